"""The forecaster as a subclass of River's, for what checks the class."""

from __future__ import annotations

from river.time_series.base import Forecaster

from sepsa.stream.forecast import forecaster


class SepSAForecaster(forecaster.SepSAForecaster, Forecaster):
    """`sepsa.SepSAForecaster`, which is also a `river.time_series.base.Forecaster`.

    Choose it in a program of River; both learn and forecast alike.
    """
