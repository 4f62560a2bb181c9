"""Engines and learners with one head, squared errors and no experts, where an option does not say otherwise."""

from __future__ import annotations

from functools import partial

from sepsa.learner import engine, stream_learner

PLAIN = {"optimizer": "adam", "ridge": 1.0, "forgetting": 1.0, "loss": "squared", "body": "fourier"}
Engine = partial(engine.Engine, **PLAIN)
StreamLearner = partial(stream_learner.StreamLearner, **PLAIN)
