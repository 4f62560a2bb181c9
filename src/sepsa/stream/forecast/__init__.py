"""Online forecasts of time series, where the target of each step of the horizon comes late."""

from sepsa.stream.forecast.forecaster import SepSAForecaster as SepSAForecaster
from sepsa.stream.forecast.intervals import OnlineIntervals as OnlineIntervals
