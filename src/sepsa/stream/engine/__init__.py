"""The engine: a body with a linear head that learns rows of numbers, compiled."""

from sepsa.stream.engine.compiled import Engine as Engine
