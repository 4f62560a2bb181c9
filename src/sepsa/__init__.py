"""sepsa: train models with a linear head, the head by a stochastic Newton method, the body as before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sepsa._version import __version__
from sepsa.states import REGISTERED_BY
from sepsa.validation import needs_extra

if TYPE_CHECKING:
    from sepsa import checkpoint as checkpoint
    from sepsa.checkpoint import load as load
    from sepsa.checkpoint import save as save
    from sepsa.features import FourierFeatures
    from sepsa.forecast import OnlineIntervals as OnlineIntervals
    from sepsa.forecast import SepSAForecaster as SepSAForecaster
    from sepsa.forecast.panel import SepSAPanelForecaster as SepSAPanelForecaster
    from sepsa.heads import (
        RLS,
        HeadSolver,
        LogisticNewton,
        NotFinite,
        OnlineLBFGS,
        PerOutput,
        SoftmaxNewton,
    )
    from sepsa.interfaces.sklearn import SepSAClassifier as SepSAClassifier
    from sepsa.interfaces.sklearn import SepSARegressor as SepSARegressor
    from sepsa.training.joint import muon
    from sepsa.training.observe import observe
    from sepsa.training.optimizer import SepSA

__all__ = [
    "RLS",
    "FourierFeatures",
    "HeadSolver",
    "LogisticNewton",
    "NotFinite",
    "OnlineLBFGS",
    "PerOutput",
    "SepSA",
    "SoftmaxNewton",
    "__version__",
    "muon",
    "observe",
]

# Imported together when the first of them is asked for: the command line prints help and errors without torch.
_CORE = ("features", "heads", "training.joint", "training.observe", "training.optimizer")
_LAZY = {"features", "heads", *__all__}
_PLAIN = ("checkpoint", "load", "save")  # the module of checkpoints and two of its names, which need numpy alone
# Behind the extra `stream`, so imported when first asked for, and not for `import *`.
_STREAM = {
    "OnlineIntervals": "sepsa.forecast",
    "SepSAClassifier": "sepsa.interfaces.sklearn",
    "SepSAForecaster": "sepsa.forecast",
    "SepSAPanelForecaster": "sepsa.forecast.panel",
    "SepSARegressor": "sepsa.interfaces.sklearn",
}
# What a checkpoint may hold of them; `load` imports the module, in which the class registers itself.
REGISTERED_BY.update({f"sepsa.{name}": module for name, module in _STREAM.items()})
REGISTERED_BY.update(
    {"sepsa.river": "sepsa.river", "sepsa stream": "sepsa.shell.model", "sepsa forecast": "sepsa.shell.series"}
)


def __getattr__(name: str) -> Any:
    if name in _STREAM:
        with needs_extra(f"sepsa.{name}", "stream"):
            return getattr(importlib.import_module(_STREAM[name]), name)
    if name in _PLAIN:
        checkpoint = importlib.import_module("sepsa.checkpoint")
        return getattr(checkpoint, name, checkpoint)
    if name not in _LAZY:
        raise AttributeError(f"module 'sepsa' has no attribute {name!r}")
    with needs_extra(f"sepsa.{name}", "torch"):
        for home in _CORE:
            module = importlib.import_module(f"sepsa.{home}")
            globals().update({each: vars(module)[each] for each in __all__ if each in vars(module)})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PLAIN, *_STREAM})
