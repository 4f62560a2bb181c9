"""What every head solver does with its head: own it, move it with its state, and restore both together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import is_new_head, owned_head
from sepsa.heads.base.parameters import commit, join, store

if TYPE_CHECKING:
    from typing_extensions import Self


class OwnsHead(ABC):
    """Base of the head solvers: `bind`, `to`, `checkpoint` and `rollback`.

    An update replaces the attributes that `_replaced` names, and writes into none of the tensors in them.
    """

    linear: nn.Linear | None = None
    _replaced: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def _start(self, linear: nn.Linear) -> None:
        """Make the state of a solver that has learned nothing yet."""

    @abstractmethod
    def _ready(self) -> nn.Linear:
        """The head, with the state on its device."""

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> Self:
        """Own `linear`; its present weights become the prior mean. A second head is refused."""
        if is_new_head(self._label(), self.linear, linear):
            self._start(linear)
            self.linear = linear
        return self

    def to(self, device: torch.device | str | int) -> Self:
        """Move the head and its state together."""
        self._head().to(device)
        self._ready()
        return self

    def checkpoint(self) -> Any:
        """What `rollback` returns to: cheap, a copy of the head's weights and references to the rest."""
        linear = self._ready()
        return tuple(getattr(self, name) for name in self._replaced), join(linear)

    def rollback(self, checkpoint: Any) -> None:
        """Undo every update since `checkpoint()` returned this."""
        self._ready()
        values, head = checkpoint
        self._assign(head, **dict(zip(self._replaced, values, strict=True)))

    def _assign(self, head: Tensor | None = None, **attributes: Any) -> None:
        """Set these attributes, and the head's weights (m, p): an interrupt leaves all of them set or none."""
        linear = self._head()

        def write() -> None:
            self.__dict__.update(attributes)
            if head is not None:
                store(linear, head)

        commit(write)

    def _label(self) -> str:
        """The name of the solver in errors."""
        return type(self).__name__

    def _head(self) -> nn.Linear:
        return owned_head(self._label(), self.linear)

    def _shape_words(self) -> str:
        """The head's shape for a repr."""
        return "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
