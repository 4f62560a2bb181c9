"""Head solvers: each owns the curvature of one `nn.Linear` and sets its weights."""

from sepsa.heads.rls import RLS
from sepsa.heads.slimtik import SlimTik

__all__ = ["RLS", "SlimTik"]
