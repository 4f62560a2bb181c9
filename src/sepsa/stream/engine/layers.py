"""The weights of the compiled engine's body: where they lie, and how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sepsa.stream.engine.core import Core
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.kernels.body import FOURIER

BANDWIDTH = 1.4  # of Fourier features, over standardized inputs


def layers(core: Core) -> list[tuple[Floats, Floats]]:
    """Weight (width, inputs) and bias (width,) of each hidden layer, as views in torch's shapes."""
    views, at, theta = [], 0, core.memory("THETA", "network")
    width = core.form.inputs
    for h in core.form.hidden:
        weight = theta[at : at + width * h].reshape(width, h).T
        at += width * h
        views.append((weight, theta[at : at + h]))
        at, width = at + h, h
    return views


def draw(core: Core) -> None:
    """Draw the weights and biases of all layers."""
    rng, settings = core.rng, core.form.settings
    for weight, bias in layers(core):
        weight[:] = body_weights(rng, settings, weight.shape, weight.shape[1])
        if settings["activation"] == FOURIER:
            bias[:] = rng.uniform(0.0, 2 * math.pi, bias.shape)
        else:
            bias[:] = rng.normal(0.0, 0.5, bias.shape)  # spreads the kinks over the data


def body_weights(rng: np.random.Generator, settings: Mapping[str, int], shape: Any, inputs: int) -> Any:
    """Random weights for units with these inputs: normal for Fourier features, else Kaiming uniform."""
    if settings["activation"] == FOURIER:
        return rng.normal(0.0, BANDWIDTH * math.sqrt(1 / inputs), shape)
    bound = math.sqrt(6 / inputs)
    return rng.uniform(-bound, bound, shape)
