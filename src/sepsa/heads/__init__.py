"""Head solvers: each owns the curvature of one `nn.Linear` and sets its weights."""

from sepsa.heads._affine import commit
from sepsa.heads._checks import check_rows
from sepsa.heads._delta import Delta
from sepsa.heads.lbfgs import OnlineLBFGS
from sepsa.heads.logistic import LogisticNewton
from sepsa.heads.per_output import PerOutput
from sepsa.heads.rls import RLS
from sepsa.heads.slimtik import SlimTik
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.heads.solver import (
    Capturable,
    CapturableByRow,
    Forgets,
    HeadSolver,
    HoldsOut,
    LearnsPartly,
    NotFinite,
    Revertible,
)

__all__ = [
    "RLS",
    "Capturable",
    "CapturableByRow",
    "Delta",
    "Forgets",
    "HeadSolver",
    "HoldsOut",
    "LearnsPartly",
    "LogisticNewton",
    "NotFinite",
    "OnlineLBFGS",
    "PerOutput",
    "Revertible",
    "SlimTik",
    "SoftmaxNewton",
    "check_rows",
    "commit",
]
