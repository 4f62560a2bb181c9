"""sktime: a forecaster whose `update` learns new rows, without a refit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from sepsa.forecast.forecaster import SepSAForecaster
from sepsa.validation import needs_extra

with needs_extra("sepsa.engines.sktime", "sktime"):
    import pandas as pd
    from sktime.forecasting.base import BaseForecaster


class SktimeForecaster(BaseForecaster):  # type: ignore[misc]
    """`sepsa.SepSAForecaster` as a forecaster of sktime.

    Choose it in pipelines, tuners and evaluations of sktime. `update` learns the new rows, in the time that these rows
    take, and the forecaster is then as if `fit` had got all rows. Rows up to the last one learned are left out.
    With `update_params=False` new rows wait: forecasts start after them, and the next `update` learns them. Unless
    `set_config(remember_data=False)` is called, sktime itself stores all rows.

    Args:
        horizon: Number of rows that can be forecast. None: the last step of the `fh` that `fit` gets, otherwise 24.
        lags: As for `sepsa.SepSAForecaster`, and so are all others.
        seasons: Periods in rows, or "auto".
        forgetting: Forgetting factors in (0.5, 1], one head for each.
        ridge: Ridge of the heads.
        bounds: The least and the largest value that a series can have, None for no bound.

    Examples:
        >>> import pandas as pd
        >>> from sepsa.engines.sktime import SktimeForecaster
        >>> load = pd.Series([float(hour % 24) for hour in range(610)])
        >>> model = SktimeForecaster(seasons=[24]).set_config(remember_data=False)
        >>> model.fit(load[:500], fh=[1, 2, 3]).update(load[500:]).predict().round()
        610    10.0
        611    11.0
        612    12.0
        dtype: float64
    """

    _tags = {  # noqa: RUF012  sktime's own form
        "authors": ["sepsa"],
        "maintainers": ["sepsa"],
        "python_dependencies": ["sepsa", "scikit-learn"],
        "y_inner_mtype": "pd.DataFrame",
        "X_inner_mtype": "pd.DataFrame",
        "capability:multivariate": True,
        "capability:exogenous": True,
        "capability:insample": False,
        "capability:pred_int": True,
        "capability:pred_int:insample": False,
        "capability:missing_values": True,
        "capability:update": True,
        "capability:categorical_in_X": False,
        "requires-fh-in-fit": False,
    }

    def __init__(
        self,
        horizon: int | None = None,
        lags: int | str = "auto",
        seasons: Sequence[float] | str = "auto",
        forgetting: Sequence[float] = (0.9995, 1.0),
        ridge: float = 30.0,
        bounds: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.horizon, self.lags, self.seasons = horizon, lags, seasons
        self.forgetting, self.ridge, self.bounds = forgetting, ridge, bounds
        super().__init__()

    def _fit(self, y: Any, X: Any, fh: Any) -> SktimeForecaster:
        horizon = self.horizon
        if horizon is None:
            horizon = 24 if fh is None else max(1, int(fh.to_relative(self.cutoff).to_numpy().max()))
        options = {name: value for name, value in self.get_params().items() if name != "horizon"}
        self.forecaster_ = self._ahead = SepSAForecaster(horizon, **options).update(y, _as_array(X))
        self._last = y.index[-1]
        return self

    def _update(self, y: Any, X: Any = None, update_params: bool = True) -> SktimeForecaster:
        new = y[y.index > self._last]
        if len(new):
            # Rows that wait are learned by another forecaster, which takes this one's place at the next update.
            ahead = copy.deepcopy(self._ahead)
            ahead.update(new, None if X is None else _as_array(X.reindex(new.index)))
            self._ahead, self._last = ahead, new.index[-1]
        if update_params:
            self.forecaster_ = self._ahead
        return self

    def _predicted(self, fh: Any, X: Any, levels: Sequence[float] = ()) -> tuple[Any, dict[float, Any]]:
        """The index of `fh`, and quantiles (steps, series) of these levels, with the forecasts in place of medians."""
        index = fh.to_absolute_index(self.cutoff)
        if self.cutoff[0] < self._last:
            raise NotImplementedError(
                f"forecasts start after {self._last}, the last row that was learned, got fh after {self.cutoff[0]}: "
                "fit a forecaster on the rows up to there"
            )
        steps = fh.to_relative(self.cutoff).to_numpy().astype(int)
        most = int(steps.max())
        if X is not None:
            rows = type(fh)(np.arange(1, most + 1), freq=fh.freq)
            X = _as_array(X.reindex(rows.to_absolute_index(self.cutoff)))
        forecast, quantiles = self._ahead.predict(most, X, quantiles=levels)
        made = quantiles | {0.5: forecast}
        return index, {level: np.asarray(part).reshape(most, -1)[steps - 1] for level, part in made.items()}

    def _predict(self, fh: Any, X: Any) -> Any:
        index, made = self._predicted(fh, X)
        return pd.DataFrame(made[0.5], index=index, columns=self._get_columns(method="predict"))

    def _predict_quantiles(self, fh: Any, X: Any, alpha: Sequence[float]) -> Any:
        index, made = self._predicted(fh, X, alpha)
        parts = [made[level] for level in alpha]
        columns = self._get_columns(method="predict_quantiles", alpha=alpha)
        return pd.DataFrame(np.stack(parts, -1).reshape(len(index), -1), index=index, columns=columns)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        """Return the parameters that sktime's checks try.

        Args:
            parameter_set: The name of a set, all of which are the same.
        """
        return [{}, {"horizon": 12, "lags": 3, "seasons": [7], "forgetting": [0.999], "ridge": 3.0}]


def _as_array(X: Any) -> Any:
    """Inputs without their names, which sktime has checked."""
    return None if X is None else X.to_numpy(np.float64)
