"""How a head learns while the model runs: hooks, one observation, rows and masks, the part of the ranks."""

from sepsa.observe.hooks import HeadHook, InputHook, OutputHook, OutputProbe
from sepsa.observe.observation import Observation, Observations, observe
from sepsa.observe.observer import Observer

# Pickled models and optimizers name the hooks, the probe and the observer here.
__all__ = ["HeadHook", "InputHook", "Observation", "Observations", "Observer", "OutputHook", "OutputProbe", "observe"]
