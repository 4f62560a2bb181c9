"""The engine: a body with a linear head that learns rows of numbers, compiled."""

from sepsa.learner.engine.compiled import Engine as Engine
