"""River's interface: the models of `sepsa.stream.river`, `Delayed`, and `SepSAForecaster`, which `evaluate` takes."""

from __future__ import annotations

from sepsa.validation import needs_extra

with needs_extra("sepsa.river", "river"):
    from sepsa.stream.delayed import Delayed
    from sepsa.stream.forecast.river import SepSAForecaster
    from sepsa.stream.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor

__all__ = ["Delayed", "SepSAClassifier", "SepSAForecaster", "SepSAMultiTargetRegressor", "SepSARegressor"]
