"""Self-tuning heads: several plain heads learn the same samples, and the best at new samples sets the weights."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import check_rows, explain_nonfinite
from sepsa.heads.base.head import OwnsHead
from sepsa.heads.base.newton import NewtonHead
from sepsa.heads.base.parameters import commit, copy_head, join, store, twin_of
from sepsa.heads.math import score as scores
from sepsa.heads.protocols import HeadSolver, Revertible
from sepsa.heads.rls import RLS
from sepsa.heads.tuning import (
    RESTS,
    START_RIDGE,
    Choice,
    Learning,
    Progress,
    changed,
    compiled_backends,
    errors_of,
    heaviest,
    members_of,
    read_progress,
    resting,
    settings_of,
)
from sepsa.states import schema

# Where comparisons end: the first has this many updates and samples at least, later ones, after 64, 128, 256, ...
# updates, have `LATER` updates, between the present ridge and those that are smaller and larger by `NEIGHBOUR`.
FIRST, FIRST_SAMPLES, LATER, AGAIN, NEIGHBOUR = 32, 512, 8, 64, 5.0
LEAST, MOST = 1e-4, 1e6  # relative ridges beyond which no member goes
_KEYS = {"members", "heads", "sums", "products", "count", "active", "steps", "scale", "started", "history"}
# Attributes of the member that sets the head's weights.
_OF_THE_BEST = (
    *("backend", "class_shares", "class_weight", "covariance", "health", "objective", "pos_weight", "predict"),
    *("predict_proba", "ridge_left", "ridge_now", "samples", "sample"),
)


class SelfTuning(OwnsHead):
    """Train a head by several solvers at once, of which the best at new samples sets the weights.

    Choose it for least squares where the data or the body change, and you do not know how fast: `SelfTuning()` compares
    three `RLS(ridge="evidence")` that remember all samples, about 50 updates, and about 10. Each member is a solver of
    its own on a copy of the head, so an update costs that of all members. The error of a member at samples before it
    learns them is its score, of which older updates fade. The member with the smallest score sets the head's weights;
    where scores differ only by chance, the one that remembers most. A member that is not active looks at its ridge once
    in 64 updates. Without drift one `RLS(ridge="evidence")` is as good, and costs a third or less.
    For features that nothing changes choose `SelfTuning.of(RLS, noise_factor=1.0)`, which follows a jump sooner.

    `SelfTuning.of` makes heads of another kind or with settings given; for cross-entropy it chooses the ridge, whose
    members are compared only now and then.

    `covariance`, `health`, `predict`, `sample`, `predict_proba` and the like are those of the active member.

    Args:
        members: Solvers that are not bound to a head, of one loss; they are copied. None: three `RLS`, of forgetting 1,
            0.98 and 0.9, with ridges by evidence.
        rests: Whether a comparison ends after 32 updates, so that the best member goes on alone and is later compared
            with neighbours of its ridge.

    Attributes:
        members: The solvers, bound to copies of the head after `bind`.
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `RLS`, `SoftmaxNewton` and `LogisticNewton`, which cost less where the settings are known.

    Examples:
        >>> import torch
        >>> from sepsa import SelfTuning
        >>> _ = torch.manual_seed(0)
        >>> head = SelfTuning().bind(torch.nn.Linear(2, 1))
        >>> for step in range(100):
        ...     features = torch.randn(8, 2)
        ...     head.update(features, features.sum(1, keepdim=True))
        >>> head.forgetting  # the data do not change
        1.0
    """

    relative = False  # whether the members' ridges are relative to the mean square of the first features
    members: Sequence[Any] = ()  # until a copy has its own

    def __init__(self, members: Sequence[HeadSolver] | None = None, *, rests: bool = False) -> None:
        given = members_of(RLS) if members is None else list(members)
        if not given:
            raise ValueError("members must be one head solver or more, got none")
        for member in given:
            plain = isinstance(member, HeadSolver) and isinstance(member, Revertible)
            if not plain or type(member) is SelfTuning:
                raise TypeError(f"members must be plain head solvers with checkpoint() and rollback(), got {member!r}")
            if getattr(member, "linear", None) is not None:
                raise ValueError(f"members must be new solvers that own no head, got {member!r}: they are copied")
        self._given: list[Any] = given
        self.rests = rests
        self.members = given

    @classmethod
    def of(cls, kind: type, **settings: Any) -> SelfTuning:
        """Return a self-tuning head of one kind of solver, which chooses the settings that are not given.

        Args:
            kind: `RLS`, for which the forgetting is chosen, and the ridge by evidence; or `SoftmaxNewton` or
                `LogisticNewton`, for which the ridge is, at about the cost of one head: five ridges in the first 32
                updates, later the present one and two neighbours for 8 updates after 64, 128, 256, ... updates. These
                ridges are relative to the mean square of the features in the first update. Choose those two where
                samples do not repeat: over many epochs of a small data set no sample is new, and the chosen ridge is
                too small.
            **settings: Settings of all members, such as `forgetting=0.99`.

        Returns:
            A `SelfTuning`.
        """
        head = cls(members_of(kind, **settings), rests=kind is not RLS)
        head.relative = "ridge" not in settings and kind is not RLS
        return head

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        self.members = [copy.deepcopy(member).bind(twin_of(linear)) for member in self._given]
        settings = [settings_of(member) for member in self.members]
        wanted = [self.rests and ridge == START_RIDGE for _, ridge in settings]
        active = wanted.index(True) if any(wanted) else 0
        history = (Choice(0, *settings[active]),)
        scale = 0.0 if self.relative else 1.0
        J = len(self.members)
        self._now = Progress(scores.start(J), active, (0,) * J, scale=scale, history=history)

    def _ready(self) -> nn.Linear:
        """The head, with the members where it is and as far moved as it was."""
        linear = self._head()
        weight, last = linear.weight, self.members[-1].linear.weight
        if last.device != weight.device or last.dtype != weight.dtype:
            for member in self.members:
                member.linear.to(weight.device, weight.dtype)
        return linear

    @property
    def best(self) -> Any:
        """The member that sets the head's weights."""
        return self.members[self._now.active] if self.linear is not None else self.members[0]

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_THE_BEST or not self.members:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.linear is not None:
            self._move(self._ready())
        return getattr(self.best, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the members and their scores, without the head's weights."""
        self._ready()
        now = self._now
        return {
            "members": [member.state_dict() for member in self.members],
            "heads": torch.stack([join(member.linear) for member in self.members]),
            "sums": torch.tensor(now.score.sums, dtype=torch.float64),
            "products": torch.tensor(now.score.products, dtype=torch.float64),
            "count": now.score.updates,
            "active": now.active,
            "steps": now.steps,
            "scale": now.scale,
            "started": now.started,
            "history": [list(change) for change in now.history],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver with the same members, whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        linear = self._ready()
        saved = schema.read("state_dict", state_dict, _KEYS, "SelfTuning")
        states = saved.items("members")
        J, like = len(states), join(linear)
        if not J:
            raise saved.damaged("members", "one state or more", "none")
        heads = saved.tensor("heads", (J, *like.shape), like.dtype, like.device)
        members = []
        for k in range(J):
            member = copy.deepcopy(self._given[min(k, len(self._given) - 1)]).bind(twin_of(linear))
            member.load_state_dict(states[k])
            store(member.linear, heads[k])
            members.append(member)
        now = read_progress(saved, [member.steps for member in members])
        self._assign(members=members, _now=now)

    def checkpoint(self) -> Any:
        """Return what `rollback` restores."""
        linear = self._ready()
        states = [(member, member.checkpoint()) for member in self.members]
        return states, self._now, join(linear)

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        linear = self._ready()
        states, now, head = checkpoint

        def write() -> None:
            for member, state in states:
                member.rollback(state)
            self.members = [member for member, _ in states]
            self._unscale(now)
            self._now = now
            store(linear, head)

        commit(write)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(member).__name__ for member in self._given))
        return f"SelfTuning({len(self._given)} of {kinds}{self._shape_words()})"

    # ------------------------------------------------------------------ the choice

    @property
    def chosen(self) -> list[Choice]:
        """The last 1,000 changes of the active member as (update, forgetting, ridge); the last one is active."""
        return list(self._now.history)

    @property
    def scores(self) -> list[float]:
        """The recent mean error of each member at samples before they were learned, outliers clipped."""
        score = self._now.score
        return [value / max(score.updates, 1e-9) for value in score.sums]

    @property
    def ridge(self) -> float:
        """The ridge of the active member."""
        return settings_of(self.best)[1]

    @property
    def forgetting(self) -> float:
        """The forgetting of the active member; setting it sets that of all members."""
        return float(self.best.forgetting)

    @forgetting.setter
    def forgetting(self, value: float) -> None:
        for member in self.members:
            member.forgetting = value

    @property
    def forgets(self) -> bool:
        """Whether the next update forgets; see `sepsa.heads.Forgets`."""
        return all(getattr(member, "forgets", True) for member in self.members)

    @forgets.setter
    def forgets(self, value: bool) -> None:
        for member in self.members:
            member.forgets = value

    @property
    def learns_partly(self) -> bool:
        """Whether the members take samples of which some outputs are not observed."""
        return all(getattr(member, "learns_partly", False) for member in self._given)

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return self._now.steps

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor, *weight: Tensor | None) -> Tensor:
        """Return the loss that the members minimize, for the body to follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: Targets as the members take them.
            *weight: Weights, where the members' loss takes them.

        Returns:
            A scalar.
        """
        loss: Tensor = self.members[0].loss(outputs, targets, *weight)  # of all members; this runs inside graphs
        return loss

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Score every member on samples as one block, then let it learn them.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets as the members take them.
            sample_weight: Factor (...) on each sample's loss.

        Raises:
            NotFinite: A value is NaN, infinite or too large; nothing was learned.
            ValueError: A shape is wrong; nothing was learned.
        """
        linear = self._ready()
        squared = self._checked(linear, features, targets, sample_weight)
        kind = features.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
            self._update(linear, features, targets, sample_weight, squared)

    def _checked(self, linear: nn.Linear, features: Tensor, targets: Tensor, weight: Tensor | None) -> bool:
        """Check samples once for all members where these are `RLS`, and return whether they are."""
        if all(type(member) is RLS for member in self.members):
            check_rows(linear, features, targets, weight)
            return True
        for member in self.members:
            if isinstance(member, NewtonHead):
                member._check(linear, features, targets, weight)
        return False

    def _update(
        self, linear: nn.Linear, features: Tensor, targets: Tensor, weight: Tensor | None, squared: bool
    ) -> None:
        """Score the samples, then learn them: completely, also where an interrupt comes, or not at all."""
        unmoved, unscaled = self._move(linear), self._now
        before = unscaled if unscaled.scale else self._scaled(features)
        members, samples = self.members, (features, targets, weight)
        backends = compiled_backends(members, features.numel() // linear.in_features) if squared else None
        learning = Learning(members, samples, before, backends, squared)
        # What compiled updates compute anyway is not computed twice.
        if backends is None or weight is not None or len(members) == 1:
            learning.errors, learning.size = errors_of(members, features, targets, weight, squared)

        def write() -> None:
            learning.run()
            if not all(learning.refusals):
                now, left = self._after(before, learning)
                self.members, self._now = left, now
                copy_head(left[now.active].linear, linear)

        commit(write)
        if all(learning.refusals):
            self._unscale(unscaled)
            for heads, old in unmoved:
                replace(heads, old)
            raise learning.refusals[0] if not squared else explain_nonfinite(features, targets, linear)

    def _after(self, now: Progress, learning: Learning) -> tuple[Progress, Sequence[Any]]:
        """The progress after an update, and the members that go on."""
        members, refusals, errors = learning.members, learning.refusals, learning.errors
        learned = tuple(count + (not refused) for count, refused in zip(now.learned, refusals, strict=True))
        now = now._replace(steps=now.steps + 1, learned=learned)
        if errors is not None:
            errors = [scores.LARGEST if refused else error for error, refused in zip(errors, refusals, strict=True)]
            score = scores.add(now.score, errors, learning.size)
            best = scores.best(score, [getattr(member, "forgetting", 1.0) for member in members], now.active)
            now = changed(now._replace(score=score), best, members)
        if not self.rests:
            return now, members
        if now.started == RESTS:
            return self._started(now, members[0])
        alone = members[now.active]
        long = now.steps - now.started >= (LATER if now.started else FIRST)
        if long and (now.started or alone.samples >= FIRST_SAMPLES):
            return resting(now), [alone]
        return now, members

    def _started(self, now: Progress, alone: Any) -> tuple[Progress, list[Any]]:
        """A comparison of the only member with neighbours of its ridge, where it is due."""
        if now.steps < AGAIN or now.steps & (now.steps - 1):
            return now, [alone]
        most = min(MOST * now.scale, heaviest(alone, now))
        near = alone.ridge / NEIGHBOUR, min(alone.ridge * NEIGHBOUR, most)
        ridges = [r for r in near if LEAST <= r / now.scale <= MOST and r != alone.ridge]
        others = [alone._with_ridge(ridge, twin_of(alone.linear)) for ridge in ridges]
        members = [alone, *(other for other in others if other is not None)]
        learned = now.learned * len(members)
        return now._replace(score=scores.start(len(members)), learned=learned, started=now.steps), members

    def _move(self, linear: nn.Linear) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Move every member as far as the head was moved from outside. Returns where members were before."""
        before, mine = [], self.members[self._now.active].linear
        for name, value in linear._parameters.items():
            own = mine._parameters[name]
            if value is not None and own is not None and (value.is_cuda or not torch.equal(value, own)):
                heads = [member.linear._parameters[name].detach() for member in self.members]
                before.append((heads, [head.clone() for head in heads]))
                replace(heads, [head + (value.detach() - own.detach()) for head in heads])
        return before

    # ------------------------------------------------------------------ the scale of relative ridges

    def _scaled(self, features: Tensor) -> Progress:
        """Give relative ridges the scale of the first features, unless these are not finite."""
        size = float(features.detach().double().square().mean())
        if math.isfinite(size):
            scale = 10.0 ** (2 * round(math.log10(math.sqrt(size)))) if size > 0 else 1.0
            self._start_members(scale)
            history = (Choice(0, *settings_of(self.members[self._now.active])),)
            self._now = self._now._replace(scale=scale, history=history)
        return self._now

    def _unscale(self, now: Progress) -> None:
        """Take the scale away again after a first update that learned nothing."""
        if not now.scale:
            self._start_members(1.0)
            self._now = now

    def _start_members(self, scale: float) -> None:
        """Begin the members anew, with their ridges times `scale`."""
        for member, given in zip(self.members, self._given, strict=True):
            member._start_with(given.ridge * scale)


def replace(heads: list[Tensor], values: list[Tensor]) -> None:
    """Give heads other weights, all of them or none."""
    commit(lambda: torch._foreach_copy_(heads, values))
