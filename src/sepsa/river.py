"""River's interface: the models of `sepsa.stream.river`, and `SepSAForecaster`, which River's `evaluate` takes."""

from __future__ import annotations

from sepsa.validation import needs_extra

with needs_extra("sepsa.river", "river"):
    from sepsa.stream.forecast.river import SepSAForecaster
    from sepsa.stream.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor

__all__ = ["SepSAClassifier", "SepSAForecaster", "SepSAMultiTargetRegressor", "SepSARegressor"]
