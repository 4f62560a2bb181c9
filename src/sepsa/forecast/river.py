"""The forecaster as a subclass of River's, for what checks the class."""

from __future__ import annotations

from river.time_series.base import Forecaster

from sepsa.forecast import forecaster
from sepsa.states.objects import rebuilt_as


@rebuilt_as("sepsa.river.SepSAForecaster")
class SepSAForecaster(forecaster.SepSAForecaster, Forecaster):
    """`sepsa.SepSAForecaster`, which is also a `river.time_series.base.Forecaster`.

    Choose it in a program of River; both learn and forecast alike.

    Args:
        horizon: Number of rows to forecast.
        lags: Number of last values that are inputs. "auto": four times the shortest season, between 24 and 96.
        seasons: Periods in rows. "auto": day, week and year where rows have times, as soon as there are two of them,
            otherwise found in the first 16, 32, ..., 2,048 rows.
        forgetting: Forgetting factors in (0.5, 1], one head for each.
        ridge: Ridge of the heads; 30 has the weight of thirty rows of unit inputs.
        step: Seconds between two rows, or "day", "business day", "week", "month", "quarter" or "year". None: found
            in the call that brings the second time.
        bounds: The least and the largest value that a series can have, None for no bound.
        every: Rows of a block. 1: forecasts are made after every row. 24: they are made every 24 rows, for the next
            `horizon` ones together, by the learner of `SepSARegressor` with a row for each block, which holds the last
            three blocks, those of a season ago, and inputs. `fit` is its `fit`, `update` its `partial_fit`.
        start: The row at which a block begins, counted from midnight, for rows of days from Monday, and for months from
            January; without times, the number of rows before the first block. Rows after the last whole block are
            learned when it is complete, and until then the forecast is the rest of that block. With `every` alone.
        known_ahead: Whether the exogenous inputs of a row are known before it is forecast. `errors_` are then those of
            forecasts that use them, and with `every` so is all that is learned.
        seed: Seed of the learner of blocks.
    """
