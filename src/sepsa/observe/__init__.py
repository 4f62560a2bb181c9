"""How a head learns while the model runs: one observation, its rows and masks, the head, the ranks, the hooks."""

from sepsa.observe.hooks import HeadHook, OutputHook, OutputProbe, observers_of
from sepsa.observe.observation import Observation, Observations
from sepsa.observe.observer import Observer, observe

# Pickled models and optimizers name the hooks, the probe and the observer here.
__all__ = [
    "HeadHook",
    "Observation",
    "Observations",
    "Observer",
    "OutputHook",
    "OutputProbe",
    "observe",
    "observers_of",
]
