"""Engines: a body with a linear head that learns rows of numbers, compiled or in torch."""

from sepsa.stream.engine.compiled import Engine as Engine
from sepsa.stream.engine.layout import Layout as Layout  # where pickles of version 0.1 look for it
