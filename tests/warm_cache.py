"""Compile the numba kernels that the tests call, once, before every worker of pytest would compile them.

`python tests/warm_cache.py heads`, `... float32`, `... float64` (the stream engine by the dtype of its body), `...
experts` and `... forecast` take a minute each where the cache is cold, and are independent: `make test` runs them
beside the linters. Where no folder can hold compiled code, every process of the tests would compile it again: an error
of one line.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sepsa import RLS, SelfTuning


def heads():
    for dtype in (torch.float32, torch.float64):
        features, targets = torch.randn(8, 3, dtype=dtype), torch.randn(8, 2, dtype=dtype)
        for solver in (RLS(), SelfTuning()):
            solver.bind(nn.Linear(3, 2, dtype=dtype))
            for _ in range(5):
                solver.update(features, targets)


def stream(dtype):
    from sepsa.stream.engine import Engine

    X = np.random.default_rng(0).standard_normal((60, 3))
    engine = Engine(3, 1, (4,), dtype=dtype)
    engine.learn(X, X[:, :1].copy())
    engine.predict(X)
    if dtype is np.float32:
        X.flags.writeable = False  # as scikit-learn's checks give it
        engine.predict(X)
        table()


def experts():
    from sepsa import SepSARegressor

    X = np.random.default_rng(0).standard_normal((60, 3))
    SepSARegressor(body="experts").partial_fit(X, X[:, 0]).predict(X)


def forecast():
    from sepsa import SepSAForecaster

    series = np.random.default_rng(0).standard_normal(300)
    SepSAForecaster(2, lags=4, seasons=()).prequential(series, coverage=0.9)


def table():
    from sepsa.cli import app

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_text("x,y\n" + "1,2\n" * 5)
        app(["stream", str(path), "--target", "y", "--predictions", f"{folder}/out.csv"], standalone_mode=False)


KERNELS = {
    "heads": heads, "float32": lambda: stream(np.float32), "float64": lambda: stream(np.float64), "experts": experts,
    "forecast": forecast,
}  # fmt: skip

if __name__ == "__main__":
    warnings.filterwarnings("error", "sepsa: no folder for compiled code")
    try:
        KERNELS[sys.argv[1]]()
    except RuntimeWarning as missing:
        sys.exit(str(missing))
