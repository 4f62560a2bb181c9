"""The options of engines, of scikit-learn's estimators and of River's models, each declared, told and checked once.

An option of `LearnerOptions` reaches the engine from every interface.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sepsa.learner.arithmetic import body
from sepsa.learner.experts import tree_parts
from sepsa.validation import at_least, in_range, not_negative, one_of

if TYPE_CHECKING:
    from typing import Self

    import numpy as np


ACTIVATIONS = {"identity": body.IDENTITY, "relu": body.RELU, "gelu": body.GELU, "fourier": body.FOURIER}
# β1 of Adam; "auto" is Adam without momentum: a gradient is taken at a head that has moved since the last one.
OPTIMIZERS = {"adam": 0.9, "auto": 0.0}
LOSSES = {"huber": 1, "squared": 0, "squared_error": 0}
BODIES = ("auto", "fourier", "experts")
RIDGES = (10.0, 1.0, 100.0)  # the candidates where ridge is "auto"
FORGETTINGS = (0.999, 0.99)  # of small heads beside those that do not forget
DISCOUNT = 0.99  # per row, of the losses by which heads are weighted
POWER = 0.5  # of the likelihood in a head's weight: below 1 because errors of neighbouring rows are alike

# Options that River's users and scikit-learn's users know by different names.
PAIRS = (("hidden", "hidden_layer_sizes"), ("lr", "learning_rate"), ("seed", "random_state"))


@cache
def descriptions() -> dict[tuple[str, str], str]:
    """The docstring below each field of the classes in this file, by class and field; none where there is no source."""
    found: dict[tuple[str, str], str] = {}
    with suppress(OSError):
        for node in ast.parse(Path(__file__).read_text("utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for field, text in pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[node.name, ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


class NamedOptions:
    """A base of dataclasses whose error for an unknown option names the class and the closest option.

    `help` of a class below them describes the options as the fields do.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        doc = inspect.cleandoc(cls.__doc__ or "")
        if not doc or "\nArgs:\n" in doc or cls.__module__ == __name__:
            return
        of, told = [base.__name__ for base in cls.__mro__[::-1]], descriptions()
        texts = {name: text for owner in of for (known, name), text in told.items() if known == owner}
        lines = [f"{name}: {texts[name]}" for name in names_of(cls) if name in texts]
        args = "Args:\n" + "\n".join(
            textwrap.fill(line, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines
        )
        parts = re.split(r"\n\n(?=(?:Attributes|See also|Examples):\n)", doc, maxsplit=1)
        cls.__doc__ = "\n\n".join([parts[0], args, *parts[1:]])

    if not TYPE_CHECKING:  # type checkers and editors see the constructor of the dataclass

        def __new__(cls, *values: Any, **options: Any) -> Self:
            known = names_of(cls)
            for name in options:
                if name not in known:
                    same = [option for pair in PAIRS if name in pair for option in pair if option in known]
                    closest = same or get_close_matches(name, known, n=1, cutoff=0.4)
                    cure = f"did you mean {closest[0]!r}?" if closest else f"its options are {', '.join(known)}"
                    raise TypeError(f"{cls.__name__} has no option {name!r}: {cure}")
            return super().__new__(cls)


def names_of(cls: Any) -> list[str]:
    """The names of a dataclass's fields in the order of its constructor."""
    return [field.name for field in sorted(fields(cls), key=attrgetter("kw_only"))]


@dataclass(eq=False, repr=False, kw_only=True)
class LearnerOptions(NamedOptions):
    """The parameters that all learners of rows share."""

    optimizer: Literal["auto", "adam"] = "auto"
    """The body's: "adam", or "auto" for Adam without momentum where single rows are learned."""

    weight_decay: float = 0.0
    """The body's weight decay."""

    ridge: float | Literal["auto"] = 10.0
    """The head's ridge; 10 has the weight of ten rows of unit features. "auto": rows learned in order also try 1 and
    100."""

    forgetting: float | Literal["auto"] = "auto"
    """The head's forgetting factor in (0, 1]; below 1 it follows drift. It acts once a row, in `fit` once a mini-batch.
    "auto": several heads, mixed by their recent errors; 0.98 in `fit`."""

    loss: Literal["huber", "squared", "squared_error"] = "huber"
    """"huber" bounds the influence of an outlier, which what more than one row in fifty has is not; "squared", in
    scikit-learn's words "squared_error", does not, nor does `fit` where weights differ more than tenfold."""

    body: Literal["auto", "fourier", "experts"] = "auto"
    """"experts" for neighbours, trees, products of inputs, the last target and others beside the network, weighted by
    their recent errors; "fourier" for the network alone, which learns a stream about three times as fast. "auto":
    "experts", except without hidden layers."""

    max_rows: int = 16384
    """The last rows that the trees among the experts keep, at one byte for each input and about 120 more."""


@dataclass(eq=False, repr=False, kw_only=True)
class EngineOptions(LearnerOptions):
    """The options of an engine, which checks them."""

    hidden: Sequence[int] = (50,)
    """Widths of the hidden layers; () for a linear model."""

    activation: str = "relu"
    """Of the hidden units, one of `ACTIVATIONS`."""

    lr: float = 1e-3
    """The body's learning rate."""

    batch: int = 1
    """Rows per step."""

    skip: bool = False
    """Whether the head sees the inputs beside the hidden units."""

    standardize: bool = False
    """Whether the network sees (x - mean) · scale."""

    classes: bool = False
    """Whether targets are indicators of classes."""

    trees: int = tree_parts.TREES
    """How many trees there are among the experts."""

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("loss", self.loss, LOSSES)
        one_of("body", self.body, BODIES)
        self.lr = in_range("lr", self.lr, 0.0, math.inf)
        self.weight_decay = not_negative("weight_decay", self.weight_decay)
        self.batch = at_least("batch", self.batch, 1)
        self.max_rows = at_least("max_rows", self.max_rows, 64)
        self.trees = at_least("trees", self.trees, 16)
        self.experts = body_of(self.body, self.hidden) == "experts"
        self.heads = candidate_heads(self.ridge, self.forgetting, self.hidden, self.skip)

    def settings(self, inputs: int) -> dict[str, int]:
        """The options that are sizes of an engine's memory, by which kernels see them."""
        return {
            "activation": ACTIVATIONS[self.activation],
            "standardize": int(self.standardize),
            "batch": self.batch,
            "robust": LOSSES[self.loss],
            "classes": int(self.classes),
            "inflation": 1,
            "room": tree_parts.room_for(0, inputs, self.max_rows) if self.experts else 0,
            "trees": self.trees,
            "rate": tree_parts.RATE,
        }

    def of_kernels(self) -> tuple[float, ...]:
        """The options of the record `experts.frame.OPTIONS`, in its order."""
        calibration = max(keeps for _, _, keeps in self.heads)
        return self.lr, self.weight_decay, OPTIMIZERS[self.optimizer], DISCOUNT, POWER, calibration


@dataclass(eq=False, repr=False)
class Options(LearnerOptions):
    """The parameters of the regressor, and of the classifier but one; `fit` and `partial_fit` check them."""

    hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto"
    """Widths of the hidden layers; () for a linear model. "auto": (50, 50) for `fit`, 64 for `partial_fit`."""

    activation: str = "auto"
    """"fourier", "gelu", "relu" or "identity". "auto": "gelu" for `fit`, "fourier" for
    `partial_fit`."""

    _: KW_ONLY
    learning_rate: float | Literal["auto"] = "auto"
    """The body's. "auto": 3e-3 for `partial_fit`; for `fit` it falls from 1e-2 to 0."""

    batch_size: int | Literal["auto"] = "auto"
    """Rows per step. "auto": 1 in `partial_fit`, mini-batches in `fit`."""

    max_iter: int = 400
    """The largest number of passes of `fit`; large tables get fewer."""

    early_stopping: bool = True
    """Whether `fit` chooses the number of passes by rows left out."""

    random_state: int | np.random.RandomState | None = None
    """Seed or generator of the body's initial weights and of the shuffling."""

    verbose: int = 0
    """1 to print the passes of `fit` and their errors, 0 for nothing."""


@dataclass(eq=False, repr=False, kw_only=True)
class ClassifierOptions(Options):
    """The parameters of the classifier."""

    class_weight: dict[Any, float] | Literal["balanced"] | None = None
    """Dict of the weight of each class, 1 for classes that it does not have; "balanced" for `fit` alone."""


@dataclass(eq=False, repr=False)
class RiverOptions(LearnerOptions):
    """The parameters of River's models, which check them."""

    hidden: Sequence[int] = (64,)
    """Widths of the hidden layers; () for a linear model."""

    activation: str = "fourier"
    """"fourier" (random features, trained), "gelu", "relu" or "identity"."""

    _: KW_ONLY
    lr: float = 3e-3
    """The body's learning rate."""

    missing: Literal["auto", "mean", "zero"] = "auto"
    """What a missing feature means: its "mean", the number "zero", or "auto" to decide for each feature."""

    max_features: int = 256
    """The most features that are learned; the cost grows with its square. Later ones are ignored, with a warning."""

    skip: bool = True
    """Whether the head sees the inputs beside the hidden units."""

    seed: int | None = None
    """Seed of the body's initial weights; None for a random one."""

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, Sequence):
            raise TypeError(f"hidden must be a sequence of widths such as (50,), got {self.hidden!r}")
        self.hidden = self.hidden or []  # River reads a tuple as a class with its parameters, and fails at an empty one
        self.max_features = at_least("max_features", self.max_features, 1)

    def of_learner(self) -> dict[str, Any]:
        """The options of a `StreamLearner`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "max_features"}


def of_estimator(parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
    """The options of an engine from the parameters of a scikit-learn estimator; those with other names are checked.

    With `for_fit` it has one head, and rate, forgetting and batch are those of `partial_fit` after `fit`: at the rate
    by which a new body learns, single rows would change a fitted one too much.
    """
    meant = {"hidden_layer_sizes": (64,), "activation": "fourier", "learning_rate": 3e-3, "batch_size": 1}
    if for_fit:
        meant |= {"hidden_layer_sizes": (50, 50), "activation": "gelu", "learning_rate": 1e-4}
        meant |= {"optimizer": "adam", "ridge": 10.0, "forgetting": 1.0}
    names = (*meant, *(each.name for each in fields(LearnerOptions)))
    chosen = {name: parameters[name] for name in names}
    chosen |= {name: value for name, value in meant.items() if isinstance(chosen[name], str) and chosen[name] == "auto"}
    sizes = chosen.pop("hidden_layer_sizes")
    widths = sizes if isinstance(sizes, Iterable) else (sizes,)
    return {
        "hidden": tuple(at_least("hidden_layer_sizes", width, 1) for width in widths),
        "lr": in_range("learning_rate", chosen.pop("learning_rate"), 0.0, math.inf),
        "batch": at_least("batch_size", chosen.pop("batch_size"), 1),
        "skip": True,
        "trees": tree_parts.TABLE_TREES if for_fit else tree_parts.TREES,
        **chosen,
    }


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
    keeps = 1.0 if forgetting == "auto" else in_range("forgetting", forgetting, 0.0, 1.0)  # type: ignore[arg-type]
    heads = [(features, strength, keeps) for strength in ridges]
    if forgetting != "auto":
        return heads
    small, factors = ("inputs", (1.0, 0.99)) if hidden and skip else (features, FORGETTINGS)
    return heads + [(small, ridges[0], factor) for factor in factors]
