"""sepsa: train models with a linear head, the head by a stochastic Newton method, the body as before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sepsa import checkpoint as checkpoint
from sepsa._version import __version__
from sepsa.checkpoint import load as load
from sepsa.checkpoint import save as save
from sepsa.features import FourierFeatures
from sepsa.heads import RLS, HeadSolver, LogisticNewton, NotFinite, OnlineLBFGS, PerOutput, SelfTuning, SoftmaxNewton
from sepsa.joint import muon
from sepsa.observe import observe
from sepsa.optimizer import SepSA
from sepsa.states.objects import REGISTERED_BY

__all__ = [
    "RLS",
    "FourierFeatures",
    "HeadSolver",
    "LogisticNewton",
    "NotFinite",
    "OnlineLBFGS",
    "PerOutput",
    "SelfTuning",
    "SepSA",
    "SoftmaxNewton",
    "__version__",
    "muon",
    "observe",
]

if TYPE_CHECKING:
    from sepsa.stream.forecast import SepSAForecaster as SepSAForecaster
    from sepsa.stream.sklearn import SepSAClassifier as SepSAClassifier
    from sepsa.stream.sklearn import SepSARegressor as SepSARegressor

# Behind the extra `stream`, so imported when first asked for, and not for `import *`.
_STREAM = {
    "SepSAClassifier": "sepsa.stream.sklearn",
    "SepSAForecaster": "sepsa.stream.forecast",
    "SepSARegressor": "sepsa.stream.sklearn",
}
# What a checkpoint may hold of them; `load` imports the module, in which the class registers itself.
REGISTERED_BY.update({f"sepsa.{name}": module for name, module in _STREAM.items()})
REGISTERED_BY.update({"sepsa.river": "sepsa.river", "sepsa stream": "sepsa.stream.tables.model"})
REGISTERED_BY["sepsa forecast"] = "sepsa.stream.tables.series"


def __getattr__(name: str) -> Any:
    if name not in _STREAM:
        raise AttributeError(f"module 'sepsa' has no attribute {name!r}")
    try:
        module = importlib.import_module(_STREAM[name])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "sepsa":
            raise
        raise ModuleNotFoundError(
            f"sepsa.{name} needs {missing}, which is not installed: pip install 'sepsa[stream]'", name=missing
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_STREAM})
