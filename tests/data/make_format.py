"""Write a checkpoint of the present format, and what its model predicts: run once, when a format is released."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import sepsa
from sepsa.states.file import FORMAT

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4))
model = sepsa.SepSARegressor(hidden_layer_sizes=(4,), random_state=0).partial_fit(X, X @ np.arange(1.0, 5.0))
path = Path(__file__).parent / f"format-{FORMAT}.sepsa"
model.save(path)
rng = np.random.default_rng(7)
X = rng.normal(size=(5, 4))
y = X @ np.arange(1.0, 5.0) + 0.1 * rng.normal(size=5)
told = {"before": model.predict(X).tolist()}
told["after"] = model.partial_fit(X, y).predict(X).tolist()
path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
