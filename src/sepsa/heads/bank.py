"""Self-tuning recursive least squares: a bank of heads over (λ, ridge), of which the best at new samples drives.

Symbols as in rls.py. The members of one λ share all that was seen, M = Σ λ^age [Φ Y]ᵀ[Φ Y], whose blocks
S = Σ λ^age ΦᵀΦ and C = Σ λ^age YᵀΦ are, and N with the rows D, the part of its ridge that each coordinate has left,
G = D prior, and D prior². The member of ridge r is then

    A = S + r D,    W = (C + r G) A⁻¹,

the very minimizer that RLS(ridge=r, forgetting=λ) keeps. It costs one Cholesky factor a member and update, as it would
in any form: below λ = 1 RLS gives a share of all p coordinates their ridge back in each update, which is O(p³) too.

A member's error at a sample it has not learned is honest and free. From the second epoch on no sample is new, and what
a head has learned, or the body that made the features, flatters those that remember most. So a fixed tenth of all
samples, told apart by a hash of the raw row, is learned the first time it comes and never again, neither by the heads
nor by the body, and only this tenth is scored while samples repeat. What is left of the first time is taken out: a
head that learned (φ, y) with weight w = λ^age and now errs by e would err by e / (1 - w φᵀA⁻¹φ) had it not.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads._checks import check_rows, explain_nonfinite, in_range, is_new_head
from sepsa.heads.rls import _EVERY, RLS, Array, Desk, Posterior, as_tensor, restored

# The grid, by evidence: benchmarks/self_tuning.py. A ridge is relative to the squared size of the first features.
GRID = ((1.0, 0.1), (1.0, 3.0), (1.0, 1000.0), (0.98, 0.1), (0.98, 1000.0), (0.9, 0.1))
START = (1.0, 3.0)  # the member that drives before any has made a different error
# One sample in so many is held out once samples repeat.
_HELD_OUT = 10
# An error weighs this factor less with each sample scored after it.
_FADING = 0.98
# Errors that differ by no more than so many standard errors count as equal, and the longer memory wins.
_CERTAINTY = 0.5
# No error counts for more than so many times the mean one of the best: how badly a member failed while the world
# changed says nothing about it afterwards.
_OUTLIER = 4.0
# Below this share of the targets' mean square errors are as good as none.
_EXACT = 1e-6
# Samples not held out are scored again after so many new ones among those that would be.
_QUIET = 50
# What is remembered: so many held-out samples, of a data set ten times as large, and so many changes of the choice.
_SEEN_LIMIT = 2**17
_HISTORY_LIMIT = 1000


class Choice(NamedTuple):
    """From this update on, this member of the bank drives the model."""

    step: int
    forgetting: float
    ridge: float


class Meeting(NamedTuple):
    """What is known of the samples of one update: positions among its rows."""

    scored: list[int] | None  # None: all of them
    held: list[int]
    ages: list[int]  # updates since each held sample was learned
    first_seen: list[int]  # hashes to remember
    first_code: int
    unrepeated: int


class SelfTuningRLS(RLS):
    """Recursive least squares that chooses its forgetting, its ridge, or both: what `RLS(forgetting="auto")` makes.

    Choose it where nobody knows how fast the body makes old curvature stale, or how noisy the targets are. Each member
    of the bank equals the `RLS` of its settings; the one with the smallest recent error at samples before it learns
    them sets the head's weights, and where errors differ by chance, the one that remembers most. `chosen` tells which,
    over time; `forgetting` and `ridge` are those of now. An update costs a Cholesky factor of A a member.

    Ridges of the grid are relative to the squared size (root mean square) of the features in the first update, rounded
    to a power of ten.

    `SepSA` hands over the model's inputs as the samples' `identity`; alone, features and targets are it. A tenth of
    the samples become a validation set when they come again, and teach neither head nor body from then on. A sample
    that never comes twice alike (data augmentation) always counts as new, as do those of a data set beyond 1.3
    million once the memory for hashes is full.
    """

    _TENSORS = ("_M", "_N", "_W", "_score", "_prior", "_basis")
    _NUMBERS = (
        *("ridge", "forgetting", "_grid", "_scale", "_member", "_steps", "_mass", "_masses", "_cursors"),
        *("_salt", "_first", "_unrepeated"),
    )

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = "auto",
        forgetting: float | Literal["auto"] = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype=dtype)
        forgettings = (
            [lam for lam, _ in GRID] if forgetting == "auto" else [in_range("forgetting", forgetting, 0.0, 1.0)]
        )
        ridges = [r for _, r in GRID] if ridge == "auto" else [in_range("ridge", ridge, 0.0, math.inf)]
        both = forgetting == ridge == "auto"
        self._grid = GRID if both else tuple(dict.fromkeys((lam, r) for lam in forgettings for r in ridges))
        self._scale = 0.0 if ridge == "auto" else 1.0  # 0: not yet known
        self._sort()
        self._auto = tuple(name for name, value in (("ridge", ridge), ("forgetting", forgetting)) if value == "auto")
        self.held_out: Tensor | None = None  # which rows of the last update were, if any

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> SelfTuningRLS:
        """Own the curvature of `linear`; its present weights become the prior mean of every member."""
        if not is_new_head("RLS", self.linear, linear):
            return self
        super().bind(linear)
        L, J, (m, p) = len(self._lambdas), len(self._grid), self._prior.shape
        new = self._prior.new_zeros
        self._H, self._desk.H = new(0), None  # a member's A is in its factor
        # Of this a coordinate with all of its ridge has one in N: 1, the prior and its square.
        self._basis = torch.cat([torch.ones_like(self._prior[:1]), self._prior, self._prior.square()])
        self._M, self._N = new(L, p + m, p + m), self._basis.expand(L, -1, -1).clone()
        self._W = self._prior.expand(J, m, p).clone()
        self._factor = new(J, p, p)
        self._score = new(J + 1, J + 1)  # QQᵀ of the samples scored, faded: Q the members' errors over a row of ones
        self._masses, self._cursors = (0.0,) * L, (0,) * L
        self._seen: dict[int, int] = {}  # hash of a sample in the fold: the update that learned it
        self._first, self._unrepeated = -1, _QUIET
        self._salt = zlib.crc32(self._prior.cpu().numpy().tobytes())  # another fold with another seed
        self._history: list[tuple[int, int]] = []
        self._choose(self._grid.index(START) if START in self._grid else 0)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself: the whole bank, its scores, and which samples it knows."""
        state = super().state_dict()
        seen = torch.tensor([*self._seen.keys(), *self._seen.values()], dtype=torch.int64).reshape(2, -1)
        return state | {"seen": seen, "history": tuple(self._history)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, grid included; anything else is refused whole."""
        state = dict(state_dict)
        seen, history = state.pop("seen", None), state.pop("history", None)
        if not isinstance(seen, Tensor) or seen.dtype != torch.int64 or seen.ndim != 2 or len(seen) != 2:
            raise ValueError(f"state_dict['seen'] must be an int64 tensor of shape (2, n), got {seen!r}")
        if not isinstance(history, (tuple, list)) or not all(len(entry) == 2 for entry in history):
            raise ValueError(f"state_dict['history'] must be pairs of update and member, got {history!r}")
        super().load_state_dict(state)
        self._sort()
        self._seen = dict(zip(*seen.tolist(), strict=True))
        self._history = [(int(step), int(member)) for step, member in history]
        if self._scale:
            self._factor = self._solve(self._desk, self._M, self._N, self._scale)[1]
        self._desk.weights.copy_(self._driving())

    def _sort(self) -> None:
        self._lambdas = list(dict.fromkeys(lam for lam, _ in self._grid))
        self._of = [self._lambdas.index(lam) for lam, _ in self._grid]  # which λ each member has

    def __repr__(self) -> str:
        auto = dict.fromkeys(self._auto, '"auto"')
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        lam, r = self._grid[0]
        ridge, forgetting = auto.get("ridge", f"{r:g}"), auto.get("forgetting", f"{lam:g}")
        return f"RLS(ridge={ridge}, forgetting={forgetting}{head})"

    def _ready(self) -> Desk:
        linear = self._bound()
        if not self._desk.fits(linear):
            for name in ("_Z", "_H", "_energy", "_ridge_left", "_factor"):
                setattr(self, name, getattr(self, name).to(linear.weight.device))
        return super()._ready()

    # ------------------------------------------------------------------ what it chose

    @property
    def members(self) -> list[tuple[float, float]]:
        """The bank: (forgetting, ridge) of each member."""
        return [(lam, r * (self._scale or 1.0)) for lam, r in self._grid]

    @property
    def chosen(self) -> list[Choice]:
        """Which member drove the model from which update on, the last one now; at most the last 1,000 changes."""
        self._ready()
        members = self.members
        return [Choice(step, *members[member]) for step, member in self._history]

    @property
    def scores(self) -> dict[tuple[float, float], float]:
        """The recent mean squared error of each member at samples it had not learned, outliers cut off."""
        self._ready()
        return dict(zip(self.members, (self._score[:-1, -1] / self._score[-1, -1]).tolist(), strict=True))

    def _choose(self, member: int) -> None:
        self.forgetting, self.ridge = self.members[member]
        self._member = member
        self._mass = self._masses[self._of[member]]
        if not self._history or self._history[-1][1] != member:
            self._history.append((self._steps, member))
            del self._history[:-_HISTORY_LIMIT]

    def _driving(self) -> Tensor:
        """W of the member that drives."""
        return self._W[self._member]

    def _root(self) -> Tensor:
        """T with TᵀT = B of the member that drives."""
        eye = torch.eye(self._N.shape[2], dtype=self._N.dtype, device=self._N.device)
        if not self._steps:
            return eye / math.sqrt(self.ridge)
        T: Tensor = torch.linalg.solve_triangular(self._factor[self._member], eye, upper=False)
        return T

    def _settle(self) -> None:
        """Bring what the methods of RLS read in line with the member that drives."""
        (m, p), r = self._prior.shape, self.ridge
        M, N = self._M[self._of[self._member]], self._N[self._of[self._member]]
        fit = (self._driving() * (M[p:, :p] + r * N[1 : m + 1])).sum(1)
        self._energy.copy_((M.diagonal()[p:] + r * N[m + 1 :].sum(1) - fit).clamp(min=0))
        self._ridge_left = r * N[0]

    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False) -> Tensor | Posterior:
        """Predict (..., out_features); with `return_std` also the standard deviation, of the member that drives."""
        self._ready()
        self._settle()
        return super().predict(features, return_std)

    def health(self) -> dict[str, float]:
        """`RLS.health` of the member that drives."""
        self._ready()
        self._settle()
        return super().health()

    # ------------------------------------------------------------------ learning

    def update(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None = None,
        *,
        identity: Tensor | None = None,
    ) -> None:
        """Score every member, then learn: features (..., in_features), targets (..., out_features).

        `identity` (b, ...) are the raw inputs by which samples are known again, b a divisor of their number; the
        features unless given. `held_out` then tells which rows were only scored. On bad input nothing changes.
        """
        desk = self._ready()
        check_rows(desk.linear, features, targets, sample_weight)
        n = features.numel() // desk.k
        if identity is None:
            identity = features.reshape(n, -1)
        elif not identity.ndim or not len(identity) or n % len(identity):
            raise ValueError(
                f"identity must have one row a sample, or a divisor of {n} rows, got shape {tuple(identity.shape)}"
            )
        met = self._meet(identity, targets, n)
        if torch.is_autocast_enabled(desk.device):
            with torch.autocast(desk.device, enabled=False):
                self._tune(desk, features, targets, sample_weight, met)
        else:
            self._tune(desk, features, targets, sample_weight, met)

    def _meet(self, identity: Tensor, targets: Tensor, n: int) -> Meeting:
        """Which of the samples were met before; nothing is remembered yet."""
        b = len(identity)
        inputs, outputs = (
            x.detach().cpu().contiguous().reshape(b, -1).view(torch.uint8).numpy() for x in (identity, targets)
        )
        first, unrepeated, span = self._first, self._unrepeated, n // b
        fold: list[int] = []
        held: list[int] = []
        ages: list[int] = []
        new: list[int] = []
        for i in range(b):
            code = zlib.crc32(outputs[i], zlib.crc32(inputs[i], self._salt))
            if first < 0:
                first = code  # the first sample of all is in the fold, so that there is one
            if code % _HELD_OUT and code != first:
                continue
            rows = range(i * span, (i + 1) * span)
            fold.extend(rows)
            row = inputs[i].tobytes() + outputs[i].tobytes()
            name = int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True)
            if (learned := self._seen.get(name)) is None:
                unrepeated += 1
                new.append(name)
            else:
                unrepeated = 0
                held.extend(rows)
                ages.extend([self._steps - learned] * span)
        return Meeting(None if unrepeated >= _QUIET else fold, held, ages, new, first, unrepeated)

    def _tune(self, desk: Desk, features: Tensor, targets: Tensor, sample_weight: Tensor | None, met: Meeting) -> None:
        Phi, Y, mass = desk.samples(features, targets, sample_weight)
        n, p = Phi.shape
        X = np.concatenate([Phi, Y], 1) if desk.numpy else torch.cat([Phi, Y], 1)
        if not math.isfinite(desk.square(X)):
            raise explain_nonfinite(features, targets, desk.linear)
        self._follow_head(desk, features, targets)
        scale = self._scale or power_of_ten(math.sqrt(desk.square(Phi[:, : desk.k]) / (n * desk.k))) ** 2
        score = self._judge(desk, Phi, Y, met)
        learning = len(met.held) < n
        if learning:
            if met.held:
                X[met.held] = 0
                lost = len(met.held) if sample_weight is None else sample_weight.reshape(-1)[met.held].sum()
                mass -= float(lost)
            M, N = self._grown(desk, X)
            W, factor = self._solve(desk, M, N, scale)
            if not math.isfinite(desk.square(arrays(desk, W)[0])):
                raise explain_nonfinite(features, targets, desk.linear)

        # From here on nothing can fail, so the state changes.
        self._scale, self._score, self._first, self._unrepeated = scale, score, met.first_code, met.unrepeated
        self.held_out = None
        if met.held:
            held = np.zeros(n, dtype=bool)
            held[met.held] = True
            self.held_out = torch.from_numpy(held).to(features.device)
        if learning:
            if self._steps % _EVERY == 0:
                desk.remember(Phi, self._steps)
            self._M, self._N, self._W, self._factor = M, N, W, factor
            self._steps += 1
            self._masses = tuple(lam * old + mass for lam, old in zip(self._lambdas, self._masses, strict=True))
            turns = (restored(p, n, lam) for lam in self._lambdas)
            self._cursors = tuple((old + c) % p for old, c in zip(self._cursors, turns, strict=True))
            room = max(0, _SEEN_LIMIT - len(self._seen))
            self._seen |= dict.fromkeys(met.first_seen[:room], self._steps)
        self._choose(self._best())
        desk.weights.copy_(self._driving())
        desk.write()

    def _best(self) -> int:
        """Of the members whose errors exceed the smallest by no more than chance, the best that remembers most."""
        *products, (*losses, n) = self._score.tolist()
        if n <= 1:
            return self._member
        best = losses.index(min(losses))

        def by_chance(j: int) -> bool:
            # The mean of the differences against its standard error, of n samples in pairs.
            mean = (losses[j] - losses[best]) / n
            square = (products[j][j] + products[best][best] - 2 * products[j][best]) / n
            return bool(mean <= _CERTAINTY * math.sqrt(max(0.0, square - mean**2) / (n - 1)))

        chosen = [j for j in range(len(losses)) if j == best or by_chance(j)]
        return min(chosen, key=lambda j: (-self._grid[j][0], losses[j], j != self._member))

    def _judge(self, desk: Desk, Phi: Array, Y: Array, met: Meeting) -> Tensor:
        """The score with these samples, by every member before it learns them."""
        if met.scored is not None:
            if not met.scored:
                return self._score
            Phi, Y = Phi[met.scored], Y[met.scored]
        W, score = arrays(desk, self._W, self._score)
        n, (J, m, p) = len(Phi), W.shape
        E = Y.T - (W.reshape(-1, p) @ Phi.T).reshape(J, m, n)
        Q = constant(desk, [[1.0] * n] * (J + 1))
        errors = Q[:J]
        errors[...] = (E * E).mean(1)
        if met.held:
            held = met.held if met.scored is None else [met.scored.index(row) for row in met.held]
            known = as_tensor(Phi[held]).T
            (F,) = arrays(desk, torch.linalg.solve_triangular(self._factor, known.expand(J, p, -1), upper=False))
            leverage = (F * F).sum(1)
            copies = constant(desk, [[lam**age for age in met.ages] for lam, _ in self._grid])
            # The features have moved since, so the difference may come out at zero or below.
            errors[:, held] /= (1 - copies * leverage).clip(0.1) ** 2
        if seen := float(score[-1, -1]):
            usual = max(float(score[:-1, -1].min()) / seen, _EXACT * desk.square(Y) / (m * n))
            errors[...] = errors.clip(0, _OUTLIER * usual)
        return as_tensor(_FADING**n * score + Q @ Q.T)

    def _grown(self, desk: Desk, X: Array) -> tuple[Tensor, Tensor]:
        """M and N with these samples learned."""
        M, N, basis = arrays(desk, self._M, self._N, self._basis)
        n, p = len(X), N.shape[2]
        lam = constant(desk, self._lambdas)[:, None, None]
        N = lam * N
        for i, (value, start) in enumerate(zip(self._lambdas, self._cursors, strict=True)):
            end = start + restored(p, n, value)  # the coordinates in between get back what they lack
            for turn in [slice(start, end), slice(0, end - p)][: (end > start) + (end > p)]:
                N[i, :, turn] += (1 - N[i, 0, turn]) * basis[:, turn]
        return as_tensor(lam * M + X.T @ X), as_tensor(N)

    def _solve(self, desk: Desk, M_: Tensor, N_: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """W (J, m, p) of all members, and the Cholesky factors of their A."""
        M, N, of, (m, p) = *arrays(desk, M_, N_), self._of, self._prior.shape
        ridge = N[of, : m + 1] * (scale * constant(desk, [r for _, r in self._grid])[:, None, None])
        A, aim = M[of, :p, :p], as_tensor(M[of, p:, :p] + ridge[:, 1:])
        diagonal = A.reshape(-1, p * p)[:, :: p + 1]
        diagonal += ridge[:, 0]
        factor = cholesky(A)
        if factor is None:  # a ridge too small to be seen beside S
            size = as_tensor(diagonal).amax(1, keepdim=True) * (p * torch.finfo(aim.dtype).eps)
            as_tensor(diagonal).add_(size)
            factor = cholesky(A)
        if factor is None:
            factor = torch.full_like(as_tensor(A), math.nan)  # too large to square
        return torch.cholesky_solve(aim.mT, factor).mT, factor

    def _follow_head(self, desk: Desk, features: Tensor, targets: Tensor) -> None:
        """Where somebody moved the head by δ, every member moves by δ, its curvature as it is."""
        W = arrays(desk, self._driving())[0]
        desk.read()
        if not (desk.W - W).any():
            return
        delta = as_tensor(desk.W - W)
        if not bool(delta.isfinite().all()):
            desk.W[...] = W
            raise explain_nonfinite(features, targets, desk.linear)
        p = delta.shape[1]
        shift = torch.eye(p + len(delta), dtype=delta.dtype, device=delta.device)
        shift[p:, :p] = delta  # y becomes y + δφ
        self._M = shift @ self._M @ shift.T
        D, G, squares = torch.split_with_sizes(self._N, [1, len(delta), len(delta)], 1)
        self._N = torch.cat([D, G + D * delta, squares + (2 * G + D * delta) * delta], 1)
        self._W = self._W + delta

    # ------------------------------------------------------------------ what a bank does not do

    def _remembers_all(self, verb: str) -> None:
        raise ValueError(f"{verb} needs one head, and a self-tuning RLS is a bank: use RLS(ridge=..., forgetting=1.0)")

    def prepare_on_device(self) -> None:
        raise ValueError(
            "a self-tuning RLS decides on the host and cannot be captured: "
            "use RLS with numbers, or optimizer.learn without a graph"
        )


def power_of_ten(x: float) -> float:
    """The nearest power of ten, 1 for zero."""
    return 10.0 ** round(math.log10(x)) if x > 0 else 1.0


def cholesky(A: Array) -> Tensor | None:
    """The lower factors of A (J, p, p); None where one is not positive definite."""
    if isinstance(A, Tensor):
        factor, info = torch.linalg.cholesky_ex(A)
        return None if bool(info.any()) else factor
    try:  # torch's shares even the smallest matrix out to several threads, at four times the price
        return torch.from_numpy(np.linalg.cholesky(A, upper=True)).mT
    except np.linalg.LinAlgError:
        return None


def arrays(desk: Desk, *tensors: Tensor) -> Sequence[Array]:
    """Tensors as the kind of array that is cheapest here."""
    return [x.numpy() for x in tensors] if desk.numpy else tensors


def constant(desk: Desk, values: Sequence[Any]) -> Array:
    """The same for numbers, or rows of them."""
    if desk.numpy:
        return np.array(values, desk.Z.dtype)
    return torch.tensor(values, dtype=desk.root.dtype, device=desk.root.device)
