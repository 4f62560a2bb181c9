"""How a head learns while the model runs: hooks, one observation, rows and masks, the part of the ranks."""

from sepsa.observe.hooks import HeadHook, InputHook, OutputHook, OutputProbe
from sepsa.observe.observation import (
    Collection,
    Detached,
    Observation,
    Observations,
    by_name,
    is_collection,
    observe,
    observers_of,
)
from sepsa.observe.observer import Observer

__all__ = [
    "Collection",
    "Detached",
    "HeadHook",
    "InputHook",
    "Observation",
    "Observations",
    "Observer",
    "OutputHook",
    "OutputProbe",
    "by_name",
    "is_collection",
    "observe",
    "observers_of",
]
