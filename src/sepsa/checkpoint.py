"""Checkpoints: save an object to one verified file and load it, continuing bit for bit."""

from sepsa.states.file import CheckpointError, Header
from sepsa.states.objects import from_bytes, inspect, load, save, to_bytes

__all__ = ["CheckpointError", "Header", "from_bytes", "inspect", "load", "save", "to_bytes"]
