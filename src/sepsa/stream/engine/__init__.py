"""Engines: a body with a linear head that learns rows of numbers, compiled or in torch."""

from sepsa.stream.engine.compiled import Engine as Engine
