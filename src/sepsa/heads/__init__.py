"""Head solvers: each owns the curvature of one `nn.Linear` and sets its weights."""

from sepsa.heads.base.checks import check_rows
from sepsa.heads.base.parameters import commit
from sepsa.heads.cross_entropy.logistic import LogisticNewton
from sepsa.heads.cross_entropy.softmax import SoftmaxNewton
from sepsa.heads.lbfgs import OnlineLBFGS
from sepsa.heads.least_squares.delta import Delta
from sepsa.heads.least_squares.rls import RLS
from sepsa.heads.per_output import PerOutput
from sepsa.heads.protocols import (
    Capturable,
    Forgets,
    HeadSolver,
    LearnsPartly,
    NotFinite,
    PrecisionWarning,
    Revertible,
    Settles,
)

__all__ = [
    "RLS",
    "Capturable",
    "Delta",
    "Forgets",
    "HeadSolver",
    "LearnsPartly",
    "LogisticNewton",
    "NotFinite",
    "OnlineLBFGS",
    "PerOutput",
    "PrecisionWarning",
    "Revertible",
    "Settles",
    "SoftmaxNewton",
    "check_rows",
    "commit",
]
