"""The options of engines: bodies, activations, optimizers, and the heads among which a learner chooses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from sepsa.learner.arithmetic import body
from sepsa.learner.experts.tree_parts import TABLE_TREES
from sepsa.validation import at_least, in_range, not_negative, one_of

ACTIVATIONS = {"identity": body.IDENTITY, "relu": body.RELU, "gelu": body.GELU, "fourier": body.FOURIER}
# β1 of Adam; "auto" is Adam without momentum: a gradient is taken at a head that has moved since the last one.
OPTIMIZERS = {"adam": 0.9, "auto": 0.0}
LOSSES = {"huber": 1, "squared": 0, "squared_error": 0}
BODIES = ("auto", "fourier", "experts")  # what an estimator's `body` may be
RIDGES = (10.0, 1.0, 100.0)  # the candidates where ridge is "auto"
FORGETTINGS = (1.0, 0.999, 0.99)


def body_of(body: str, hidden: Any) -> str:
    """The body that the parameter `body` means; "auto" has experts, except for a linear model, which stays exact."""
    linear = isinstance(hidden, Sized) and not isinstance(hidden, str) and not len(hidden)
    return body if body != "auto" else "fourier" if linear else "experts"


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
    one_of("loss", parameters["loss"], LOSSES)
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


def adam(optimizer: str, lr: float, weight_decay: float) -> dict[str, float]:
    """The options of the body's optimizer for its kernel."""
    beta1 = OPTIMIZERS[one_of("optimizer", optimizer, OPTIMIZERS)]
    return {
        "lr": in_range("lr", lr, 0.0, math.inf),
        "decay": not_negative("weight_decay", weight_decay),
        "beta1": beta1,
    }


def of_estimator(parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
    """The options of a compiled engine from the parameters of a scikit-learn estimator, which are checked.

    With `for_fit`, rate, forgetting and batch are those of `partial_fit` after `fit`: at the rate by which a new body
    learns, single rows would change a fitted one too much.
    """
    sizes, activation, batch = (parameters[n] for n in ("hidden_layer_sizes", "activation", "batch_size"))
    options = head_and_optimizer(parameters, 1e-4 if for_fit else 3e-3, one_head=for_fit)
    default = "gelu" if for_fit else "fourier"
    if isinstance(sizes, str) and sizes == "auto":
        sizes = (50, 50) if for_fit else (64,)
    if body_of(parameters["body"], sizes) == "experts":
        options |= {"experts": True, "max_rows": parameters["max_rows"]}
        options |= {"trees": TABLE_TREES} if for_fit else {}
    return options | {
        "batch": 1 if batch == "auto" else at_least("batch_size", batch, 1),
        "loss": parameters["loss"],
        "activation": default if activation == "auto" else one_of("activation", activation, ACTIVATIONS),
        "hidden": tuple(at_least("hidden_layer_sizes", width, 1) for width in widths(sizes)),
        "skip": True,
    }


def widths(sizes: int | Sequence[int]) -> Sequence[int]:
    """The widths of hidden layers from `hidden_layer_sizes`."""
    return sizes if isinstance(sizes, Iterable) else (sizes,)
