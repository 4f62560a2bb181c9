"""What mypy knows of the interfaces: `make lint` checks this file too, so a lost type is an error there."""

from __future__ import annotations

from collections.abc import Hashable
from typing import assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

from sepsa import OnlineIntervals, SepSAForecaster, SepSARegressor

Floats = NDArray[np.float64]


def test_predict_returns_what_return_std_says() -> None:
    X = np.arange(12.0).reshape(6, 2)
    model = SepSARegressor(body="fourier", random_state=0).partial_fit(X, X[:, 0])
    assert_type(model.predict(X), NDArray[np.float64])
    mean, std = assert_type(model.predict(X, return_std=True), tuple[NDArray[np.float64], NDArray[np.float64]])
    assert mean.shape == std.shape == (6,)


def test_forecasts_have_the_type_that_is_documented() -> None:
    model = SepSAForecaster(2, lags=3).update(np.arange(40.0) % 4)
    _, values = model.predict(quantiles=[0.1])
    assert (list(values), model.predict(quantiles=[])[1]) == ([0.1], {})
    assert_type(model.forecast(), list[float] | list[dict[Hashable, float]])
    intervals = OnlineIntervals()
    assert intervals.interval(1.0) == (-np.inf, np.inf)
    low, _ = intervals.interval([1.0, 2.0])
    assert low.shape == (2,)


def test_the_options_of_an_estimator_are_known() -> None:
    assert SepSARegressor(hidden_layer_sizes=(4,), ridge=1.0).ridge == 1.0
    with pytest.raises(TypeError):
        SepSARegressor(hidden=30)  # type: ignore[call-arg]
