"""What `SoftmaxNewton` and `LogisticNewton` share: settings, saved states and logits of a `CrossEntropyState`."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from sepsa.heads.base import parameters, ridge_choice
from sepsa.heads.base.checks import bias_setting, check_rows, explain_nonfinite, ridge_setting
from sepsa.heads.base.head import OwnsHead
from sepsa.heads.base.ridge_choice import RidgeChoice
from sepsa.heads.base.state_checks import check_root, read_ridges, read_solver
from sepsa.heads.math.candidates import Choice, power_of_ten
from sepsa.heads.math.cross_entropy import CrossEntropyState, with_ridge, with_root
from sepsa.heads.protocols import PrecisionWarning
from sepsa.states import schema
from sepsa.states.schema import Entries
from sepsa.validation import in_range

_SMALL_RIDGE = 1e-12
KEYS = CrossEntropyState._fields[:-3]  # weights and ridge follow from the settings, T from A


class NewtonHead(OwnsHead):
    """Base of `SoftmaxNewton` and `LogisticNewton`; not a head by itself."""

    forgets = True  # in the next update; see `sepsa.heads.Forgets`
    settings: ClassVar[tuple[str, ...]]  # arguments that a state keeps, beside the ridges
    _state: CrossEntropyState
    _replaced = ("_state", "_previous", "_choice", "_updates", "ridge")
    _choice: RidgeChoice | None  # None: the ridge is given
    _updates: int | None = None  # the state's, where the host knows them without waiting for the device

    def __init__(
        self, ridge: float | Literal["auto"], forgetting: float, bias_ridge: float | Literal["ridge"] | None
    ) -> None:
        self._choice = RidgeChoice() if ridge == "auto" else None
        ridge = self.ridge = ridge_choice.START if ridge == "auto" else ridge_setting(ridge)
        if ridge < _SMALL_RIDGE:
            warnings.warn(
                f"ridge={ridge:g} is below {_SMALL_RIDGE:g}, where rounding errors decide how a {type(self).__name__} "
                f"moves in directions that it has no data for: use ridge={_SMALL_RIDGE:g}",
                PrecisionWarning,
                stacklevel=3,
            )
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        self.bias_ridge = bias_setting(bias_ridge)
        self._previous: Tensor | None = None  # where the last update started, for health alone

    @abstractmethod
    def _derived(self, linear: nn.Linear, W: Tensor) -> dict[str, Tensor]:
        """`weights` and `ridge` of the state, which follow from the settings; those must fit the head, W (m, p)."""

    @abstractmethod
    def _ridges(self, linear: nn.Linear, W: Tensor, ridge: float) -> Tensor:
        """The `ridge` (p,) of a state for this setting."""

    @abstractmethod
    def _parts(self, state: CrossEntropyState) -> Sequence[CrossEntropyState]:
        """The state as one for each curvature."""

    def _updates_now(self) -> int:
        """The number of updates of the output that has most."""
        if self._updates is None:
            self._updates = int(self._state.counters.reshape(-1, 3)[:, 0].max())
        return self._updates

    def _located(self) -> nn.Linear:
        """The head, with the state where it is."""
        linear = self._head()
        device = linear.weight.device
        if self._state.T.device != device:
            choice = None if self._choice is None else ridge_choice.mapped(self._choice, lambda other: other.to(device))
            self._assign(_state=self._state.to(device), _previous=None, _choice=choice)
        return linear

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is and T computed."""
        linear = self._located()
        others = () if self._choice is None else self._choice.others
        if any(state is not None and state.A is not None for state in (self._state, *others)):
            choice = None if self._choice is None else ridge_choice.mapped(self._choice, with_root)
            self._assign(_state=with_root(self._state), _choice=choice)
        return linear

    @property
    def chosen(self) -> list[Choice]:
        """Which ridge was active from which update on, ending with the present one: the last 1,000 changes."""
        history = () if self._choice is None else self._choice.history
        return [Choice(step, self.forgetting, ridge) for step, ridge in history or ((0, self.ridge),)]

    def _advanced(
        self,
        linear: nn.Linear,
        W: Tensor,
        advance: ridge_choice.Advance,
        loss: Callable[[Tensor], float],
        features: Tensor,
    ) -> tuple[CrossEntropyState, float, RidgeChoice | None, bool]:
        """An update from the weights W: the new state, its ridge, the choice of a ridge, and whether all is finite."""
        if self._choice is None:
            new, finite = advance(self._state, W)
            return new, self.ridge, None, finite

        def ridges_of(ridge: float) -> Tensor:
            return self._ridges(linear, W, ridge)

        def scale() -> float:
            size = math.sqrt(float(features.detach().to(W.dtype).square().mean()))
            return power_of_ten(size) ** 2 if 0 < size < math.inf else 0.0

        return ridge_choice.learned(
            self._choice, self._state, self.ridge, self._updates_now(), W, advance, loss, ridges_of, scale
        )

    @torch.no_grad()
    def raise_ridge(self, ridge: float) -> None:
        """Make the ridge larger, and let it stay from now on.

        Args:
            ridge: The new ridge, at least the present one; the present one ends a choice by "auto".

        Raises:
            ValueError: It is smaller than the present ridge.
        """
        linear = self._ready()
        if not ridge_setting(ridge) >= self.ridge:
            raise ValueError(f"ridge must be at least the present one, {self.ridge:g}, got {ridge:g}")
        larger = with_ridge(self._state, self._ridges(linear, self._state.W, ridge))
        if larger is not None:  # else the ridge is too small to be seen in the curvature, and stays
            choice = self._choice and ridge_choice.settled(self._choice, float(ridge), self._updates_now())
            self._assign(_state=larger, _choice=choice, ridge=float(ridge))

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        self._ready()
        state: dict[str, Any] = tensors_of(self._state)
        if self._choice is not None:
            state["choice"] = ridge_choice.written(self._choice, tensors_of)
        for name in self.settings:
            value = getattr(self, name)
            state[name] = list(value) if isinstance(value, list) else value
        return state | {"ridges": [self.ridge, self.bias_ridge]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        linear, old = self._ready(), self._state
        more = {"choice"} if self._choice is not None else set()
        saved = read_solver(type(self).__name__, state_dict, {*KEYS, *self.settings, *more})
        ridge, bias_ridge = read_ridges(saved.path("ridges"), saved["ridges"])
        kind: Any = type(self)
        with schema.settings("state_dict"):
            fresh = kind(ridge=ridge, bias_ridge=bias_ridge, **{name: saved[name] for name in self.settings})
            derived = fresh._derived(linear, old.W)

        def read_state(entries: Entries, ridge: float) -> CrossEntropyState:
            tensors = {
                key: entries.tensor(key, tuple(was.shape), was.dtype, linear.weight.device)
                for key, was in ((key, getattr(old, key)) for key in KEYS)
            }
            state = CrossEntropyState(**tensors, **derived | {"ridge": fresh._ridges(linear, old.W, ridge)})
            for part in self._parts(state):
                check_consistent(entries, part)
            return state

        state, choice = read_state(saved, ridge), None
        if self._choice is not None:
            choice = ridge_choice.read(saved, KEYS, ridge, read_state)
        settings = {name: getattr(fresh, name) for name in (*self.settings, "ridge", "bias_ridge")}
        self._assign(**settings, _state=state, _previous=None, _choice=choice, _updates=None)

    def _last_step(self) -> float:
        """The norm of the weights' change in the last update, for `health`."""
        return math.nan if self._previous is None else float(torch.linalg.vector_norm(self._state.W - self._previous))

    def _words(self, more: str) -> str:
        """`__repr__` with what is particular to the kind of head."""
        more = parameters.bias_words(self.bias_ridge) + more + self._shape_words()
        ridge = f"{self.ridge:g}" if self._choice is None else '"auto"'
        return f"{type(self).__name__}(ridge={ridge}, forgetting={self.forgetting:g}{more})"

    def _logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Φ (n, p) of features (..., in_features), and the logits (..., out_features)."""
        linear = self._ready()
        check_rows(linear, features)
        Phi = parameters.rows(linear, features, self._state.T.dtype)
        if not bool(Phi.square().sum().isfinite()):
            raise explain_nonfinite(features, None, linear)
        shape = (*features.shape[:-1], linear.out_features)
        return Phi, (Phi @ parameters.follow(linear, self._state.W).T).reshape(shape).to(linear.weight.dtype)


def tensors_of(state: CrossEntropyState) -> dict[str, Tensor]:
    """Copies of the tensors that a saved state has."""
    return {key: getattr(state, key).clone() for key in KEYS}


def check_consistent(saved: Entries, state: CrossEntropyState) -> None:
    """Raise an error for tensors that no sequence of updates can produce."""
    p = len(state.T)
    updates, seen, cursor = state.counters.tolist()
    counts = updates == int(updates) >= 0 and cursor == int(cursor) and 0 <= cursor < p
    if not counts or seen < 0 or (seen > 0 and not updates):
        raise saved.damaged("counters", f"[updates, samples, a coordinate below {p}]", state.counters.tolist())
    if not bool((state.shares > 0).all()):
        raise saved.damaged("shares", "positive", float(state.shares.min()))
    left, ridge = state.ridge_left, float(state.ridge[0])
    if not bool(((left > 0) & (left <= state.ridge * (1 + 1e-6))).all()):
        raise saved.damaged("ridge_left", f"in (0, {ridge:g}]", f"{float(left.min()):g} to {float(left.max()):g}")
    check_root(saved, "T", state.T, left)
