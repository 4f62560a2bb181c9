"""Head solvers: each owns the curvature of one `nn.Linear` and sets its weights."""

from sepsa.heads._affine import commit
from sepsa.heads._checks import check_rows
from sepsa.heads.lbfgs import OnlineLBFGS
from sepsa.heads.rls import RLS
from sepsa.heads.slimtik import SlimTik
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.heads.solver import Capturable, CapturableByRow, HeadSolver, HoldsOut, NotFinite, Revertible

__all__ = [
    "RLS",
    "Capturable",
    "CapturableByRow",
    "HeadSolver",
    "HoldsOut",
    "NotFinite",
    "OnlineLBFGS",
    "Revertible",
    "SlimTik",
    "SoftmaxNewton",
    "check_rows",
    "commit",
]
