"""River's interface: the models of `sepsa.stream.river`, and `SepSAForecaster`, which River's `evaluate` takes."""

from __future__ import annotations

try:
    from sepsa.stream.forecast.river import SepSAForecaster
    from sepsa.stream.river import SepSAClassifier, SepSAMultiTargetRegressor, SepSARegressor
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] == "sepsa":
        raise
    raise ModuleNotFoundError(
        f"sepsa.river needs {error.name}, which is not installed: pip install 'sepsa[river]'", name=error.name
    ) from None

__all__ = ["SepSAClassifier", "SepSAForecaster", "SepSAMultiTargetRegressor", "SepSARegressor"]
