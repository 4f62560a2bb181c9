"""The options of engines: bodies, activations, optimizers, and the heads among which a learner chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from sepsa.stream.kernels import body
from sepsa.validation import in_range, not_negative, one_of

ACTIVATIONS = {
    "identity": body.IDENTITY,
    "relu": body.RELU,
    "tanh": body.TANH,
    "sigmoid": body.SIGMOID,
    "gelu": body.GELU,
    "fourier": body.FOURIER,
}
# The options each optimizer takes beside lr and weight_decay, with torch.optim's defaults; momentum is Adam's β1.
OPTIMIZERS: dict[str, tuple[int, dict[str, float]]] = {
    "sgd": (body.SGD, {}),
    "momentum": (body.SGD, {"momentum": 0.9}),
    "nag": (body.SGD, {"momentum": 0.9, "nesterov": 1.0}),
    "rmsprop": (body.RMSPROP, {"momentum": 0.0, "beta2": 0.99, "eps": 1e-8}),
    "adam": (body.ADAM, {"momentum": 0.9, "beta2": 0.999, "eps": 1e-8}),
    # Adam without momentum: a gradient is taken at a head that has moved since the last one.
    "auto": (body.ADAM, {"momentum": 0.0, "beta2": 0.999, "eps": 1e-8}),
}
LOSSES = {"squared": 0, "huber": 1}
RIDGES = (10.0, 1.0, 100.0)  # the candidates where ridge is "auto"
FORGETTINGS = (1.0, 0.999, 0.99)
BANDWIDTH = 1.4  # of Fourier features, over standardized inputs


def body_of(body: str | None, hidden: Any, experts: Sized = ()) -> str | None:
    """The body that the parameter `body` means; "auto" has experts, except for a linear model, which stays exact."""
    if len(experts):
        return "experts"
    linear = isinstance(hidden, Sized) and not isinstance(hidden, str) and not len(hidden)
    return body if body != "auto" else "fourier" if linear else "experts"


def body_weights(rng: np.random.Generator, settings: Mapping[str, int], shape: Any, inputs: int) -> Any:
    """Random weights for units with these inputs: normal for Fourier features, else Kaiming uniform."""
    if settings["activation"] == body.FOURIER:
        return rng.normal(0.0, BANDWIDTH * math.sqrt(1 / inputs), shape)
    bound = math.sqrt(6 / inputs)
    return rng.uniform(-bound, bound, shape)


def candidate_heads(
    ridge: float | str, forgetting: float | str, hidden: Sequence[int], skip: bool
) -> list[tuple[str, float, float]]:
    """The heads among which a learner chooses by their errors: the features each sees, its ridge and its forgetting.

    Where `forgetting` is "auto", a head that forgets is small: it remembers few rows and can learn few weights of them.
    """
    features = "both" if skip or not hidden else "hidden"
    ridges = RIDGES if ridge == "auto" else (in_range("ridge", ridge, 0.0, math.inf),)  # type: ignore[arg-type]
    if forgetting != "auto":
        keeps = in_range("forgetting", forgetting, 0.0, 1.0)  # type: ignore[arg-type]
        return [(features, strength, keeps) for strength in ridges]
    heads = [(features, strength, 1.0) for strength in ridges]
    if hidden and skip:
        return [*heads, ("inputs", ridges[0], 1.0), ("inputs", ridges[0], 0.99)]
    return [*heads, *((features, ridges[0], keeps) for keeps in FORGETTINGS[1:])]


def head_and_optimizer(parameters: Mapping[str, Any], rate: float, one_head: bool) -> dict[str, Any]:
    """The options of the head and of the body's optimizer from an estimator's parameters, which are checked.

    `rate` is the learning rate where it is "auto"; with `one_head` "auto" chooses no heads but plain least squares.
    """
    ridge, forgetting, given = (parameters[name] for name in ("ridge", "forgetting", "learning_rate"))
    one_of("loss", parameters["loss"], {"huber": None, "squared": None})
    if ridge != "auto":
        in_range("ridge", ridge, 0.0, math.inf)
    if forgetting != "auto":
        in_range("forgetting", forgetting, 0.0, 1.0)
    optimizer = one_of("optimizer", parameters["optimizer"], OPTIMIZERS)
    return {
        "optimizer": "adam" if one_head and optimizer == "auto" else optimizer,
        "lr": rate if given == "auto" else in_range("learning_rate", given, 0.0, math.inf),
        "weight_decay": not_negative("weight_decay", parameters["weight_decay"]),
        "ridge": 10.0 if one_head and ridge == "auto" else ridge,
        "forgetting": 1.0 if one_head and forgetting == "auto" else forgetting,
    }
