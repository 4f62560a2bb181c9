"""River's interface: the models of `sepsa.stream.river`, and `SepSAForecaster`, which River's `evaluate` takes."""

from __future__ import annotations

try:
    from sepsa.stream.forecast.river import SepSAForecaster
    from sepsa.stream.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing == "sepsa":
        raise
    raise ModuleNotFoundError(
        f"sepsa.river needs {missing}, which is not installed: pip install 'sepsa[river]'", name=missing
    ) from None

__all__ = ["SepSAClassifier", "SepSAForecaster", "SepSAMultiTargetRegressor", "SepSARegressor"]
