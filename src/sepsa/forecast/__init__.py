"""Online forecasts of time series, where the target of each step of the horizon comes late."""

from sepsa.forecast.forecaster import SepSAForecaster as SepSAForecaster
from sepsa.forecast.intervals import OnlineIntervals as OnlineIntervals
