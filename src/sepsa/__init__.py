"""sepsa: train models with a linear head, the head by a stochastic Newton method, the body as before."""

from sepsa.heads import RLS
from sepsa.optimizer import SepSA

__version__ = "0.1.0"
__all__ = ["RLS", "SepSA", "__version__"]
