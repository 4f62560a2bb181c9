"""Self-tuning heads: several plain heads learn the same samples, and the best at new samples sets the weights."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.backends import choose
from sepsa.heads.base import repeated_samples
from sepsa.heads.base.checks import check_rows, explain_nonfinite
from sepsa.heads.base.head import OwnsHead
from sepsa.heads.base.newton import NewtonHead
from sepsa.heads.base.parameters import commit, copy_head, heads_of, join, rows, store, twin_of, width
from sepsa.heads.base.repeated_samples import SeenSamples
from sepsa.heads.logistic import LogisticNewton
from sepsa.heads.math import score as scores
from sepsa.heads.math.cross_entropy import is_large
from sepsa.heads.math.score import Score
from sepsa.heads.protocols import Anneals, HeadSolver, HoldsOut, NotFinite, Revertible
from sepsa.heads.rls import RLS
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.states import schema

# (forgetting, ridge) of the members for least squares, by evidence: benchmarks/self_tuning.py; the first but one is
# active before any has made a different error. A ridge is relative to the squared size of the first features.
GRID = ((1.0, 0.1), (1.0, 3.0), (1.0, 1000.0), (0.98, 0.1), (0.98, 1000.0), (0.9, 0.1))
START = (1.0, 3.0)
# Ridges of the members for cross-entropy.
RIDGES, START_RIDGE = (0.01, 0.3, 10.0, 300.0, 1e4), 10.0
# Where comparisons end: the first has this many updates and samples at least, later ones, after 64, 128, 256, ...
# updates, have `LATER` updates, between the present ridge and those that are smaller and larger by `NEIGHBOUR`.
FIRST, FIRST_SAMPLES, LATER, AGAIN, NEIGHBOUR = 32, 512, 8, 64, 5.0
LEAST, MOST = 1e-4, 1e6  # relative ridges beyond which no member goes
# In mini-batches of a deep network the loss at the next batch would let the ridge grow without end, because the body
# changes the features anyway; benchmarks/language.py: from 3 batches on, an annealed head ends where it ends best.
BATCHES = 3.0
RESTS, SETTLED = -1, -2  # no comparison runs; none will run any more
_HISTORY_LIMIT = 1000
_KEYS = {"members", "heads", "sums", "products", "count", "active", "steps", "scale", "started", "history", "seen"}
# Attributes of the member that sets the head's weights.
_OF_THE_BEST = ("backend", "class_shares", "class_weight", "covariance", "health", "objective", "pos_weight",
                "predict", "predict_proba", "ridge_left", "samples", "sample")  # fmt: skip


class Choice(NamedTuple):
    """From this update on, a member with these settings sets the head's weights."""

    step: int
    forgetting: float
    ridge: float


class Progress(NamedTuple):
    """What an update replaces beside the members."""

    score: Score
    active: int  # the member that sets the head's weights
    learned: tuple[int, ...]  # how many updates each member has learned
    steps: int = 0  # the updates
    scale: float = 0.0  # of the ridges; 0 before the first update
    started: int = 0  # the update before which the running comparison started, or `RESTS` or `SETTLED`
    history: tuple[Choice, ...] = ()


class SelfTuning(OwnsHead):
    """Train a head by several solvers at once, of which the best at new samples sets the weights.

    Choose it where you do not know how fast the body or the data change, or how noisy the targets are. Each member is a
    solver of its own on a copy of the head, so an update costs that of all members. The error of a member at samples
    before it learns them is its score, of which older updates fade. The member with the smallest score sets the head's
    weights; where scores differ only by chance, the one that remembers most.

    `SelfTuning()` compares six `RLS`, and `SelfTuning.of` heads of another kind or with settings given. Their ridges
    are relative to the mean square of the features in the first update, rounded to a power of ten. Samples that are
    learned again, as in a second epoch, no longer give an honest error. So a tenth of the samples, chosen by a hash,
    becomes a validation set when they repeat, and neither head nor body learns from them any more. A sample that never
    repeats exactly, as with data augmentation, always counts as new, and so do samples of data sets beyond 1.3 million
    rows. Members for cross-entropy are compared only now and then, and hold out nothing: see `SelfTuning.of`.

    `covariance`, `health`, `predict`, `sample`, `predict_proba` and the like are those of the active member.

    Args:
        members: Solvers that are not bound to a head, of one loss; they are copied. None: six `RLS`, of forgetting 1,
            0.98 and 0.9 and relative ridges from 0.1 to 1,000.
        relative: Whether the members' ridges are relative to the features. None: where `members` is None.
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

    _held_out: Tensor | None = None
    _captured: Any = None  # the choice on a device
    _ratio = 1.0  # of the body's learning rate to its peak

    def __init__(
        self, members: Sequence[HeadSolver] | None = None, *, relative: bool | None = None, rests: bool = False
    ) -> None:
        given = members_of(RLS) if members is None else list(members)
        if not given:
            raise ValueError("members must be one head solver or more, got none")
        for member in given:
            if not isinstance(member, HeadSolver) or not isinstance(member, Revertible) or isinstance(member, HoldsOut):
                raise TypeError(f"members must be plain head solvers with checkpoint() and rollback(), got {member!r}")
            if getattr(member, "linear", None) is not None:
                raise ValueError(f"members must be new solvers that own no head, got {member!r}: they are copied")
        self._given: list[Any] = given
        self.relative = members is None if relative is None else relative
        self.rests = rests
        self.members: list[Any] = given

    @classmethod
    def of(cls, kind: type, **settings: Any) -> SelfTuning:
        """Return a self-tuning head of one kind of solver, which chooses the settings that are not given.

        Args:
            kind: `RLS`, for which ridge and forgetting are chosen; or `SoftmaxNewton` or `LogisticNewton`, for which
                the ridge is, at about the cost of one head: five ridges in the first 32 updates, later the present one
                and two neighbours for 8 updates after 64, 128, 256, ... updates. Choose those where samples do not
                repeat: over many epochs of a small data set no sample is new, and the chosen ridge is too small.
            **settings: Settings of all members, such as `forgetting=0.99`.

        Returns:
            A `SelfTuning`.
        """
        return cls(members_of(kind, **settings), relative="ridge" not in settings, rests=kind is not RLS)

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        self.members = [copy.deepcopy(member).bind(twin_of(linear)) for member in self._given]
        W = join(linear)
        # Another seed holds out another tenth.
        self._seen = SeenSamples(0 if W.is_meta else zlib.crc32(W.cpu().double().numpy().tobytes()))
        settings = [settings_of(member) for member in self._given]
        wanted = [pair == START or (self.rests and pair[1] == START_RIDGE) for pair in settings]
        active = wanted.index(True) if any(wanted) else 0
        history = (Choice(0, *settings[active]),)
        scale = 0.0 if self.relative else 1.0
        J = len(self.members)
        self._now = Progress(scores.start(J), active, (0,) * J, scale=scale, history=history)

    def _ready(self) -> nn.Linear:
        """The head, with the members where it is and as far moved as it was."""
        linear = self._head()
        self._read()
        weight, last = linear.weight, self.members[-1].linear.weight
        if last.device != weight.device or last.dtype != weight.dtype:
            for member in self.members:
                member.linear.to(weight.device, weight.dtype)
        return linear

    def _read(self) -> None:
        """Take over what captured updates have learned."""
        if self._captured is not None and self._captured.ahead:
            score, active, steps = self._captured.read(self._seen)
            learned = tuple(member.steps for member in self.members)
            self._now = changed(self._now._replace(score=score, steps=steps, learned=learned), active, self.members)

    @property
    def best(self) -> Any:
        """The member that sets the head's weights."""
        self._read()
        return self.members[self._now.active] if self.linear is not None else self.members[0]

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_THE_BEST or "members" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.linear is not None:
            self._move(self._ready())
        return getattr(self.best, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the members, their scores and the hashes of samples, without the head's weights."""
        self._ready()
        now = self._now
        return {
            "members": [member.state_dict() for member in self.members],
            "heads": torch.stack([join(member.linear) for member in self.members]),
            "sums": torch.tensor(now.score.sums, dtype=torch.float64),
            "products": torch.tensor(now.score.products, dtype=torch.float64),
            "count": now.score.count,
            "active": now.active,
            "steps": now.steps,
            "scale": now.scale,
            "started": now.started,
            "history": [list(change) for change in now.history],
            "seen": self._seen.state_dict(),
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
        states = saved.items("members", None if self.rests else len(self._given))
        J, like = len(states), join(linear)
        heads = saved.tensor("heads", (J, *like.shape), like.dtype, like.device)
        members = []
        for k in range(J):
            member = copy.deepcopy(self._given[0 if self.rests else k]).bind(twin_of(linear))
            member.load_state_dict(states[k])
            store(member.linear, heads[k])
            members.append(member)
        now = read_progress(saved, [member.steps for member in members])
        seen = repeated_samples.read(saved.entries("seen", {"salt", "first", "unrepeated", "hashes", "learned"}))
        self._assign(members=members, _now=now, _seen=seen, _captured=None, _held_out=None)

    def checkpoint(self) -> Any:
        """Return what `rollback` restores."""
        linear = self._ready()
        states = [(member, member.checkpoint()) for member in self.members]
        return states, self._now, self._held_out, self._seen.checkpoint(), join(linear)

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        linear = self._ready()
        states, now, held_out, seen, head = checkpoint

        def write() -> None:
            for member, state in states:
                member.rollback(state)
            self.members = [member for member, _ in states]
            self._unscale(now)
            self._now, self._held_out = now, held_out
            self._seen.rollback(seen)
            store(linear, head)

        commit(write)

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is not None:
            self._read()
        return self.__dict__ | {"_captured": None}  # CUDA graphs write to the original's memory

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(member).__name__ for member in self._given))
        return f"SelfTuning({len(self._given)} of {kinds}{self._shape_words()})"

    # ------------------------------------------------------------------ the choice

    @property
    def chosen(self) -> list[Choice]:
        """The last 1,000 changes of the active member as (update, forgetting, ridge); the last one is active.

        After captured steps the update is that at which the state was read.
        """
        self._read()
        return list(self._now.history)

    @property
    def scores(self) -> list[float]:
        """The recent mean error of each member at samples before they were learned, outliers clipped."""
        self._read()
        score = self._now.score
        return [value / max(score.count, 1e-9) for value in score.sums]

    @property
    def ridge(self) -> float:
        """The ridge of the active member."""
        return float(self.best.ridge)

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
    def holds_out(self) -> bool:
        """Whether samples that repeat are held out: not where comparisons end."""
        return not self.rests

    @property
    def held_out(self) -> Tensor | None:
        """A mask (n,) of the samples of the last update that were held out; None if there were none."""
        return self._held_out

    @property
    def learns_partly(self) -> bool:
        """Whether the members take samples of which some outputs are not observed."""
        return all(getattr(member, "learns_partly", False) for member in self._given)

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        self._read()
        return self._now.steps

    @torch.no_grad()
    def raise_ridge(self, ridge: float) -> None:
        """Make the ridge of the active member larger, let it go on alone, and compare no more.

        Args:
            ridge: The new ridge, at least the present one.

        Raises:
            ValueError: It is smaller than the present ridge.
        """
        self._move(self._ready())
        alone = copy.copy(self.best)
        alone.raise_ridge(ridge)
        now = alone_with(self._now, SETTLED)
        history = (*now.history, Choice(now.steps, *settings_of(alone)))[-_HISTORY_LIMIT:]
        self._assign(members=[alone], _now=now._replace(history=history), _captured=None)

    # ------------------------------------------------------------------ learning

    def anneal(self, ratio: float, samples_per_epoch: int | None = None) -> None:
        """Let the members follow the body's learning rate; at a ratio below 1 no new comparison of ridges starts.

        Args:
            ratio: As for `sepsa.heads.Anneals`.
            samples_per_epoch: As for `sepsa.heads.Anneals`.
        """
        self._ratio = ratio
        for member in self.members:
            if isinstance(member, Anneals):
                member.anneal(ratio, samples_per_epoch)

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
    def update(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None = None,
        *,
        identity: Tensor | None = None,
    ) -> None:
        """Score every member on samples as one block, then let it learn them.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets as the members take them.
            sample_weight: Factor (...) on each sample's loss.
            identity: Inputs (b, ...) by which samples are recognized when they repeat, b a divisor of the number of
                samples; None for the features. `SepSA` passes the model's inputs.

        Raises:
            NotFinite: A value is NaN, infinite or too large; nothing was learned.
            ValueError: A shape is wrong; nothing was learned.
        """
        linear = self._ready()
        squared = self._checked(linear, features, targets, sample_weight)
        split = None
        if self.holds_out:
            n = features.numel() // linear.in_features
            if identity is None:
                identity = features.reshape(n, -1)
            elif not identity.ndim or not len(identity) or n % len(identity):
                raise ValueError(
                    f"identity must have one row a sample, or a divisor of {n} rows, got shape {tuple(identity.shape)}"
                )
            split = self._seen.split(identity, targets, n)
        kind = features.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
            self._update(linear, features, targets, sample_weight, split, squared)

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
        self, linear: nn.Linear, features: Tensor, targets: Tensor, weight: Tensor | None, split: Any, squared: bool
    ) -> None:
        """Score the samples, then learn them: completely, also where an interrupt comes, or not at all."""
        unmoved, unscaled = self._move(linear), self._now
        before = unscaled if unscaled.scale else self._scaled(features)
        n = features.numel() // linear.in_features
        held = [] if split is None else split.held_out
        backends = RLS._compiled(self.members, n - len(held)) if squared else None
        # What compiled updates compute anyway is not computed twice.
        after = backends is not None and weight is None and split.scored is None and not held and len(self.members) > 1
        errors, size = (None, 0.0) if after else self._errors(features, targets, weight, split, squared)
        mask = None
        if held:
            out, device = set(held), linear.weight.device
            kept = torch.tensor([i for i in range(n) if i not in out], dtype=torch.int64, device=device)
            mask = torch.ones(n, dtype=torch.bool, device=device).index_fill_(0, kept, False)
            features, targets = (part.reshape(n, -1).index_select(0, kept) for part in (features, targets))
            weight = None if weight is None else weight.reshape(-1).index_select(0, kept)
        members, interrupted, lam_error = self.members, False, np.empty((len(self.members), 2))
        refusals: list[Any] = [None] * len(members)

        def learn(again: bool) -> None:
            nonlocal errors, size
            best, samples = members[before.active], (features, targets, weight)
            have = [again and member.steps > count for member, count in zip(members, before.learned, strict=True)]
            if backends is None:
                for k, member in enumerate(members):
                    if not have[k]:
                        refusals[k] = refusal(member, *samples, member is best if squared else None)
                return
            learned = have if any(have) else RLS._learn_together(members, backends, best, samples, lam_error)
            refusals[:] = [not one for one in learned]
            if after:
                errors, size = (lam_error[:, 1] / targets.numel()).tolist(), mean_square(targets)

        def write() -> None:
            nonlocal interrupted
            again, interrupted = interrupted, True
            if len(held) < n:
                learn(again)
            if not all(refusals):
                now, left = self._after(before, members, errors, size, refusals, len(held) < n)
                self.members, self._now, self._held_out = left, now, mask
                if split is not None:
                    self._seen.accept(split, now.steps)
                copy_head(left[now.active].linear, linear)

        commit(write)
        if all(refusals):
            self._unscale(unscaled)
            for heads, old in unmoved:
                replace(heads, old)
            raise refusals[0] if not squared else explain_nonfinite(features, targets, linear)

    def _after(
        self, now: Progress, members: list[Any], errors: Any, size: float, refusals: list[Any], learns: bool
    ) -> tuple[Progress, list[Any]]:
        """The progress after an update, and the members that go on."""
        if learns:
            learned = tuple(count + (not refused) for count, refused in zip(now.learned, refusals, strict=True))
            now = now._replace(steps=now.steps + 1, learned=learned)
        if errors is not None:
            errors = [scores.LARGEST if refused else error for error, refused in zip(errors, refusals, strict=True)]
            score = scores.add(now.score, errors, size)
            best = scores.best(score, [getattr(member, "forgetting", 1.0) for member in members], now.active)
            now = changed(now._replace(score=score), best, members)
        if not self.rests or now.started == SETTLED:
            return now, members
        if now.started == RESTS:
            return self._started(now, members[0])
        alone = members[now.active]
        long = now.steps - now.started >= (LATER if now.started else FIRST)
        if long and (now.started or alone.samples >= FIRST_SAMPLES):
            return alone_with(now, RESTS), [alone]
        return now, members

    def _started(self, now: Progress, alone: Any) -> tuple[Progress, list[Any]]:
        """A comparison of the only member with neighbours of its ridge, where it is due."""
        # The loss at the next batch favours a ridge that is too small for a rate that falls.
        if now.steps < AGAIN or now.steps & (now.steps - 1) or self._ratio < 1.0:
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

    def _errors(
        self, features: Tensor, targets: Tensor, weight: Tensor | None, split: Any, squared: bool
    ) -> tuple[list[float] | None, float]:
        """The loss of every member at the rows to score, None without any, and the mean square of their targets."""
        scored = None if split is None else split.scored
        if len(self.members) == 1 or (scored is not None and not scored):
            return None, 0.0
        if not squared:
            return [float(loss_of(member, features, targets, weight)) for member in self.members], 0.0
        weights: Any
        biases: Any
        weights, biases = heads_of(self.members)
        dtype = weights[0].dtype
        if dtype.itemsize < 4:
            dtype = torch.float32
            weights, biases = ([part.to(dtype) for part in parts] for parts in (weights, biases))
        x = features.detach().reshape(-1, features.shape[-1]).to(dtype)
        y = targets.detach().reshape(len(x), -1).to(dtype)
        w = None if weight is None else weight.detach().reshape(-1).to(dtype)
        if x.is_cpu:
            x, y, w = x.numpy(), y.numpy(), None if w is None else w.numpy()  # type: ignore[assignment]
            weights, biases = ([part.numpy() for part in parts] for parts in (weights, biases))
        if scored is not None:
            x, y, w = x[scored], y[scored], None if w is None else w[scored]
        with np.errstate(all="ignore"):  # what is not finite the members refuse
            errors = scores.squared_errors(weights, biases, x, y)
            if split is not None and split.held_out:
                self._unlearn(errors, features, weight, split)
            mean = errors.mean(0) if w is None else (errors * w[:, None]).sum(0) / w.sum().clip(min=1e-30)
            return mean.tolist(), float((y * y).mean())

    def _unlearn(self, errors: Any, features: Tensor, weight: Tensor | None, split: Any) -> None:
        """Make the errors (n, J) at held-out rows those of members that had never learned them."""
        held = split.held_out
        x = features.reshape(-1, features.shape[-1]).index_select(0, torch.tensor(held, device=features.device))
        Phi = rows(self._head(), x, self.members[0]._problem.prior.dtype)
        leverage = RLS._leverages(self.members, Phi).cpu().double().numpy()
        omega = np.ones(len(held)) if weight is None else weight.detach().reshape(-1)[held].double().cpu().numpy()
        ages = self._now.steps - np.array(split.learned)
        memory = np.array([member.forgetting for member in self.members])
        share = scores.share_left(leverage, memory, ages[:, None], omega[:, None])
        at = np.searchsorted(split.scored or held, held)
        errors[at] /= torch.from_numpy(share**2).to(errors) if isinstance(errors, Tensor) else share**2

    # ------------------------------------------------------------------ the scale of relative ridges

    def _scaled(self, features: Tensor) -> Progress:
        """Give relative ridges the scale of the first features, unless these are not finite."""
        size = float(features.detach().double().square().mean())
        if math.isfinite(size):
            scale = 10.0 ** (2 * round(math.log10(math.sqrt(size)))) if size > 0 else 1.0
            for member, given in zip(self.members, self._given, strict=True):
                member._start_with(given.ridge * scale)
            history = (Choice(0, *settings_of(self.members[self._now.active])),)
            self._now = self._now._replace(scale=scale, history=history)
        return self._now

    def _unscale(self, now: Progress) -> None:
        """Take the scale away again after a first update that learned nothing."""
        if not now.scale:
            for member, given in zip(self.members, self._given, strict=True):
                member._start_with(given.ridge)
            self._now = now

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Hashable:
        """Copy the state to the memory that captured updates write.

        Args:
            inputs: The data set's inputs on the device, by whose rows samples are recognized.
            targets: The data set's targets.

        Returns:
            The addresses on which a recording depends.
        """
        if any(type(member) is not RLS for member in self.members):
            kind = type(self.members[0]).__name__
            raise ValueError(
                f"a SelfTuning of {kind} compares ridges on the host, which a captured step cannot: learn some batches "
                f"without a graph first, then take {kind}(ridge={self.ridge:g}), the ridge that this head has chosen"
            )
        linear, captured = self._head(), self._captured
        if captured is None or not captured.lies_in(linear):
            self._ready()
            captured = choose.choose("captured choice", self.members[0]._case(1)).load()(linear, self.members)
        if inputs is not None and targets is not None:
            if not captured.indexes(inputs, targets):
                self._read()
            captured.use(inputs, targets, self._seen)
        if not captured.ahead:
            captured.load(self._now.score, self._now.active, self._now.steps, self._seen)
        captured.move()
        addresses = tuple(member.prepare_capture() for member in self.members)
        self._captured = captured
        return *captured.place, addresses

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        """Learn samples inside a CUDA graph, without synchronizing with the host; `held_out` is then a mask on the
        device.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).
            rows: Rows (n,) of the data set that the samples are. None: samples are recognized by a hash, which the host
                computes, so not inside a graph.

        Returns:
            A boolean scalar on the device: False where a value was not finite, so that nothing was learned.
        """
        captured = self._captured
        if captured is None or not captured.ahead:
            raise RuntimeError("update_captured needs prepare_capture() first")
        if not self._now.scale:  # in the first update, which is not recorded yet
            self._scaled(features)
        if rows is None:
            captured.index_batch(features, targets, self._seen)
            rows = torch.arange(features.numel() // features.shape[-1], device=features.device)
        valid: Tensor
        valid, self._held_out = captured.update(features, targets, rows)
        return valid

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Compute the members' curvatures after the last `update_captured`; no forward or backward pass reads them."""
        if self._captured is not None:
            self._captured.finish()


def members_of(kind: type, **settings: Any) -> list[Any]:
    """The members for one kind of solver, where settings that are given have one value."""
    make: Any = kind
    if kind not in (RLS, SoftmaxNewton, LogisticNewton):
        raise TypeError(f"kind must be RLS, SoftmaxNewton or LogisticNewton, got {kind!r}: pass members instead")
    if kind is not RLS:
        return [make(**({"ridge": ridge} | settings)) for ridge in (RIDGES[:1] if "ridge" in settings else RIDGES)]
    rest = {name: value for name, value in settings.items() if name not in ("ridge", "forgetting")}
    forgettings = [settings["forgetting"]] if "forgetting" in settings else [lam for lam, _ in GRID]
    ridges = [settings["ridge"]] if "ridge" in settings else [ridge for _, ridge in GRID]
    whole = len(forgettings) == len(ridges) > 1
    pairs = GRID if whole else [(lam, ridge) for lam in forgettings for ridge in ridges]
    return [make(ridge=ridge, forgetting=lam, **rest) for lam, ridge in dict.fromkeys(pairs)]


def settings_of(member: Any) -> tuple[float, float]:
    """The forgetting and the ridge of a solver."""
    return getattr(member, "forgetting", 1.0), getattr(member, "ridge", 0.0)


def refusal(
    member: Any, features: Tensor, targets: Tensor, weight: Tensor | None, records: bool | None
) -> NotFinite | bool | None:
    """Let a solver learn samples; an error, or True, for numbers that are not finite.

    `records` is for an `RLS` whose samples are checked: whether `health` records them.
    """
    if records is not None:
        return not member._learn(features, targets, weight, records=records)
    try:
        member.update(features, targets, weight)
    except NotFinite as error:
        return error
    return None


def loss_of(member: Any, features: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """The mean loss of a member at samples, by their weights where it is a `NewtonHead`."""
    if isinstance(member, NewtonHead):
        return member._loss_at(features, targets, weight)
    loss: Tensor = member.loss(member.linear(features.detach().to(member.linear.weight.dtype)), targets)
    return loss


def mean_square(targets: Tensor) -> float:
    """The mean square of all numbers."""
    values = targets.numpy(force=True).ravel()
    return float(values.dot(values)) / values.size


def replace(heads: list[Tensor], values: list[Tensor]) -> None:
    """Give heads other weights, all of them or none."""
    commit(lambda: torch._foreach_copy_(heads, values))


def alone_with(now: Progress, started: int) -> Progress:
    """The progress where the active member goes on alone: `RESTS` or `SETTLED`."""
    return now._replace(
        score=scores.start(1), active=0, learned=now.learned[now.active : now.active + 1], started=started
    )


def heaviest(member: Any, now: Progress) -> float:
    """The ridge that weighs as much as `BATCHES` mean batches in the curvature; no limit for batches that are small."""
    linear, n = member.linear, member.samples / max(now.steps, 1)
    if not is_large(width(linear), int(n)):
        return math.inf
    unit = float(member._ridges(linear, join(linear).double(), 1.0)[0])
    return float(BATCHES * n * now.scale / unit)


def changed(now: Progress, active: int, members: Sequence[Any]) -> Progress:
    """The progress with this active member, which `history` notes where it is another."""
    if active == now.active:
        return now
    change = Choice(now.steps, *settings_of(members[active]))
    return now._replace(active=active, history=(*now.history, change)[-_HISTORY_LIMIT:])


def read_progress(saved: schema.Entries, learned: list[int]) -> Progress:
    """The progress in a saved state, whose members have learned so many updates."""
    J = len(learned)
    sums, products = (
        saved.tensor(name, (J,) * k, torch.float64).tolist() for name, k in (("sums", 1), ("products", 2))
    )
    score = Score(saved.number("count", 0.0), sums, products)
    history = saved.items("history")
    changes = tuple(
        Choice(one.integer(0), one.number(1, 0.0, 1.0), one.number(2, 0.0))
        for one in (history.items(k, 3) for k in range(len(history)))
    )
    numbers = saved.integer("steps"), saved.number("scale", 0.0), saved.integer("started", SETTLED)
    return Progress(score, saved.integer("active", 0, J - 1), tuple(learned), *numbers, changes)
