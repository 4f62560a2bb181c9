"""River's interface: its models, `Delayed`, and `SepSAForecaster`, which `evaluate` takes."""

from __future__ import annotations

from sepsa.validation import needs_extra

with needs_extra("sepsa.river", "river"):
    from sepsa.forecast.river import SepSAForecaster
    from sepsa.interfaces.delayed import Delayed
    from sepsa.interfaces.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor

__all__ = ["Delayed", "SepSAClassifier", "SepSAForecaster", "SepSAMultiTargetRegressor", "SepSARegressor"]
