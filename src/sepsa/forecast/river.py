"""The forecaster as a subclass of River's, for what checks the class."""

from __future__ import annotations

from river.time_series.base import Forecaster

from sepsa.forecast import forecaster
from sepsa.states.objects import rebuilt_as


@rebuilt_as("sepsa.river.SepSAForecaster")
class SepSAForecaster(forecaster.SepSAForecaster, Forecaster):
    """`sepsa.SepSAForecaster`, which is also a `river.time_series.base.Forecaster`.

    Choose it in a program of River; both have the same options, and learn and forecast alike.
    """
