"""What all head solvers do with their head: own it, move it with its state, and restore both together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import bias_setting, is_new_head, ridge_setting
from sepsa.heads.base.parameters import bias_words, commit, join, store
from sepsa.heads.base.ridge import BiasRidge
from sepsa.validation import in_range

if TYPE_CHECKING:
    from typing import Self


class OwnsHead(ABC):
    """Base of the head solvers: `bind`, `to`, `checkpoint` and `rollback`.

    An update replaces the attributes that `_replaced` names, and writes into none of the tensors in them.
    """

    linear: nn.Linear | None = None
    _replaced: ClassVar[tuple[str, ...]] = ()
    _not_copied: ClassVar[tuple[str, ...]] = ()  # attributes that copies and pickles have as the class has them

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is not None:
            self._located()
        return {name: value for name, value in vars(self).items() if name not in self._not_copied}

    @abstractmethod
    def _start(self, linear: nn.Linear) -> None:
        """Make the state of a solver that has learned nothing yet."""

    @abstractmethod
    def _ready(self) -> nn.Linear:
        """The head, with the state on its device."""

    def _located(self) -> nn.Linear:
        """The head, with the state on its device, in whatever form the last update left it."""
        return self._ready()

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> Self:
        """Take ownership of a head. Its present weights become the prior mean.

        Args:
            linear: The head. A solver owns one head; binding another one is an error.

        Returns:
            This solver.
        """
        if is_new_head(type(self).__name__, self.linear, linear):
            self._start(linear)
            self.linear = linear
        return self

    def to(self, device: torch.device | str | int) -> Self:
        """Move the head and the solver's state to a device.

        Args:
            device: As for `torch.Tensor.to`.

        Returns:
            This solver.
        """
        head_of(self).to(device)
        self._ready()
        return self

    def checkpoint(self) -> Any:
        """Return what `rollback` restores: a copy of the head's weights and references to the rest of the state."""
        linear = self._located()
        return tuple(getattr(self, name) for name in self._replaced), join(linear)

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        self._located()
        values, head = checkpoint
        assign(self, head, **dict(zip(self._replaced, values, strict=True)))


class HasRidge(OwnsHead):
    """Base of the head solvers of which evidence may choose the ridge: the settings that they share."""

    settings: ClassVar[tuple[str, ...]] = ("ridge", "forgetting", "bias_ridge", "noise_factor")
    forgets = True  # in the next update; see `sepsa.heads.Forgets`

    def __init__(
        self, ridge: float | Literal["evidence"], forgetting: float, bias_ridge: BiasRidge, noise_factor: float
    ) -> None:
        self.ridge = ridge if ridge == "evidence" else ridge_setting(ridge)
        self.noise_factor = in_range("noise_factor", noise_factor, 0.0, math.inf)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        self.bias_ridge = bias_setting(bias_ridge)

    _ridge: float  # the present one

    @property
    def ridge_now(self) -> float:
        """The ridge of the weights: `ridge`, or what evidence has chosen."""
        head_of(self)
        return self._ridge

    @abstractmethod
    def _root(self) -> Tensor:
        """T (..., p, p) with TᵀT = A⁻¹, the inverse of the curvature."""

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return B = A⁻¹ (p, p), the inverse of the curvature; a bias is the last coordinate.

        Of a `LogisticNewton`, (out_features, p, p): one for each output.
        """
        T = self._root()
        B = T.mT @ T
        return (B + B.mT) / 2

    def __repr__(self) -> str:
        ridge = self.ridge if isinstance(self.ridge, str) else f"{self.ridge:g}"
        if self.ridge == "evidence" and self.linear is not None:
            ridge = f"evidence, now {self.ridge_now:.3g}"
        given = ((name, getattr(self, name)) for name in self.settings[len(HasRidge.settings) :])
        more = "".join(f", {name}={value}" for name, value in given if value)
        words = f"{bias_words(self.bias_ridge)}{more}{shape_words(self.linear)}"
        return f"{type(self).__name__}(ridge={ridge}, forgetting={self.forgetting:g}{words})"


def head_of(solver: OwnsHead) -> nn.Linear:
    """The head of a solver; an error where it has none."""
    if solver.linear is None:
        name = type(solver).__name__
        raise RuntimeError(f"this {name} is not bound to a head: call bind(linear) first, or pass it to SepSA")
    return solver.linear


def assign(solver: OwnsHead, head: Tensor | None = None, **attributes: Any) -> None:
    """Set these attributes and the head's weights (m, p); an interrupt leaves all of them set or none."""
    linear = head_of(solver)

    def write() -> None:
        for name, value in attributes.items():
            setattr(solver, name, value)
        if head is not None:
            store(linear, head)

    commit(write)


def shape_words(linear: nn.Linear | None) -> str:
    """The shape of a solver's head for a repr."""
    return "" if linear is None else f", head={linear.in_features}->{linear.out_features}"
