"""Self-tuning recursive least squares: candidates over (λ, ridge), of which the best at new samples is active.

This file keeps the state; the mathematics is in `candidates`, and `repeated_samples` tells which samples came before.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.backends.captured_candidates import CapturedCandidates
from sepsa.heads.backends.choose import Case, choose
from sepsa.heads.base import health
from sepsa.heads.base.checks import (
    bias_setting,
    check_rows,
    explain_nonfinite,
    is_new_head,
    optional_dtype,
    owned_head,
)
from sepsa.heads.base.parameters import bias_words, commit, follow, join, samples, store
from sepsa.heads.base.posterior import NormalPosterior
from sepsa.heads.base.repeated_samples import Lookup, look_up
from sepsa.heads.base.rls_state import Tuned, read_candidates, write_candidates
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import Candidates, Choice, Grid, basis_of
from sepsa.heads.math.ridge import rotation
from sepsa.validation import in_range

# The grid, by evidence: benchmarks/self_tuning.py. A ridge is relative to the squared size of the first features.
GRID = ((1.0, 0.1), (1.0, 3.0), (1.0, 1000.0), (0.98, 0.1), (0.98, 1000.0), (0.9, 0.1))
START = (1.0, 3.0)  # the candidate that is active before any has made a different error
# What is remembered: so many held-out samples, of a data set ten times as large, and so many changes of the choice.
_SEEN_LIMIT = 2**17
_HISTORY_LIMIT = 1000


class SelfTuningRLS(NormalPosterior):
    """Recursive least squares that chooses its forgetting, its ridge, or both: what `RLS(forgetting="auto")` makes.

    Choose it where nobody knows how fast the body makes old curvature stale, or how noisy the targets are. Each
    candidate equals the `RLS` of its settings; the one with the smallest recent error at samples before it learns
    them sets the head's weights, and where errors differ by chance, the one that remembers most. `chosen` tells which,
    over time; `forgetting` and `ridge` are those of now. An update costs a Cholesky factor of A a candidate.

    Ridges of the grid are relative to the squared size (root mean square) of the features in the first update, rounded
    to a power of ten. `bias_ridge` is that of `RLS`, the same for all.

    `SepSA` hands over the model's inputs as the samples' `identity`; alone, features and targets are it. A tenth of
    the samples become a validation set when they come again, and teach neither head nor body from then on. A sample
    that never comes twice alike (data augmentation) always counts as new, as do those of a data set beyond 1.3
    million once the memory for hashes is full.
    """

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = "auto",
        forgetting: float | Literal["auto"] = "auto",
        bias_ridge: float | Literal["ridge"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._grid = grid_of(GRID, ridge, forgetting)._replace(bias_ridge=bias_setting(bias_ridge))
        self._settings: dict[str, Any] = {"ridge": ridge, "forgetting": forgetting, "bias_ridge": bias_ridge}
        self.dtype = optional_dtype(dtype)
        self.linear: nn.Linear | None = None
        self._held_out: Tensor | None = None

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> SelfTuningRLS:
        """Own the curvature of `linear`; its present weights become the prior mean of every candidate."""
        if not is_new_head("RLS", self.linear, linear):
            return self
        dtype = self.dtype or (torch.float32 if linear.weight.device.type == "mps" else torch.float64)
        if linear._parameters["bias"] is None:
            self._grid = self._grid._replace(bias_ridge="ridge")
        self._prior = prior = join(linear).to(dtype)
        self._basis = basis_of(prior)
        self._seen: dict[int, int] = {}  # hash of a sample in the fold: the update that learned it
        # Another fold with another seed.
        self._salt = 0 if prior.is_meta else zlib.crc32(prior.cpu().numpy().tobytes())
        self._recent = health.Recent(prior)
        start = self._grid.settings.index(START) if START in self._grid.settings else 0
        self._state = candidates.start(self._grid, prior, 0.0 if self._settings["ridge"] == "auto" else 1.0, start)
        self._captured: CapturedCandidates | None = None
        self._on_device = False  # whether the captured state is ahead of this one
        self.linear = linear
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself: all candidates, their scores, and which samples they know."""
        return write_candidates(self._ready(), Tuned(self._grid, self._prior, self._salt, self._seen))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, grid included; anything else is refused whole."""
        state = self._ready()
        new, tuned = read_candidates(state_dict, state, Tuned(self._grid, self._prior, self._salt, self._seen))
        basis = basis_of(tuned.prior)
        if new.steps:
            new = new._replace(factor=self._backend().factored(tuned.grid, new))

        def write() -> None:
            self._grid, self._prior, self._salt, self._seen = tuned
            self._state, self._basis, self._captured = new, basis, None
            self._recent = health.Recent(self._prior)

        commit(write)

    def to(self, device: torch.device | str | int) -> SelfTuningRLS:
        """Move the head and its candidates together."""
        owned_head("RLS", self.linear).to(device)
        self._ready()
        return self

    def checkpoint(self) -> Any:
        """What `rollback` needs to undo the next update; cheap, because updates make new tensors."""
        return self._ready(), self._held_out, join(owned_head("RLS", self.linear))

    def rollback(self, checkpoint: Any) -> None:
        """Be again, head included, as when `checkpoint` was taken."""
        self._ready()
        state, held_out, head = checkpoint

        def write() -> None:
            self._state, self._held_out = state, held_out
            for name in list(self._seen)[state.seen :]:
                self._seen.pop(name, None)
            store(owned_head("RLS", self.linear), head)

        commit(write)

    @property
    def backend(self) -> str:
        """What computes an update: "numba", one compiled call, or "torch"."""
        p, prior = self._prior.shape[1], self._prior
        return choose("candidates", Case(prior.device.type, prior.dtype, p)).backend

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is not None:
            self._ready()
        return self.__dict__ | {"_captured": None}  # recordings stay with the original

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        ridge, forgetting = (
            '"auto"' if value == "auto" else f"{value:g}"
            for value in (self._settings["ridge"], self._settings["forgetting"])
        )
        head = bias_words(self._settings["bias_ridge"]) + head
        return f"RLS(ridge={ridge}, forgetting={forgetting}{head})"

    def _ready(self) -> Candidates:
        """The state as it is now, where the head is."""
        device = owned_head("RLS", self.linear).weight.device
        if self._on_device:
            assert self._captured is not None
            self._state, self._seen = self._captured.read(self._state), self._captured.read_seen(self._seen)
            self._on_device = False
        if self._prior.device != device:
            self._prior, self._basis = self._prior.to(device), self._basis.to(device)
            self._state = candidates.placed(self._state, device)
        return self._state

    # ------------------------------------------------------------------ what it chose

    @property
    def members(self) -> list[tuple[float, float]]:
        """The candidates: (forgetting, ridge) of each."""
        scale = self._ready().scale or 1.0
        return [(lam, r * scale) for lam, r in self._grid.settings]

    @property
    def chosen(self) -> list[Choice]:
        """Which candidate set the head from which update on, the last one now; at most the last 1,000 changes."""
        members = self.members
        return [Choice(step, *members[member]) for step, member in self._state.history]

    @property
    def scores(self) -> dict[tuple[float, float], float]:
        """The recent mean squared error of each candidate at samples it had not learned, outliers cut off."""
        score = self._ready().score
        return dict(zip(self.members, (score[:-1, -1] / score[-1, -1]).tolist(), strict=True))

    @property
    def forgetting(self) -> float:
        """That of the active candidate."""
        return self._grid.settings[self._ready().active][0]

    @property
    def ridge(self) -> float:
        """That of the active candidate."""
        return self.members[self._state.active][1]

    @property
    def held_out(self) -> Tensor | None:
        """Which rows (n,) of the last update were held out, as booleans; None where none was."""
        return self._held_out

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        return self._ready().steps

    @property
    def samples(self) -> float:
        """How many samples the active candidate remembers."""
        state = self._ready()
        return state.samples[self._grid.of[state.active]]

    @torch.no_grad()
    def weights(self) -> Tensor:
        """W (J, m, p) of all candidates."""
        return self._ready().W.clone()

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """B (p, p) of the active candidate, as `RLS.covariance`."""
        T = candidates.square_root(self._grid, self._ready())
        B = T.T @ T
        return (B + B.T) / 2

    @torch.no_grad()
    def objective(self) -> Tensor:
        """The minimum (m,) that the head's weights attain, one for each output."""
        return candidates.minimum(self._grid, self._ready())

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) that each coordinate of the active candidate has at the moment."""
        state = self._ready()
        return candidates.active_ridge(self._grid, state) * state.N[self._grid.of[state.active], 0]

    def _weights(self) -> Tensor:
        state = self._ready()
        return state.W[state.active]

    def _spread(self) -> tuple[Tensor, Tensor, float]:
        return candidates.square_root(self._grid, self._ready()), self.objective(), self.samples

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """`RLS.health` of the active candidate."""
        state = self._ready()
        W, T = state.W[state.active], candidates.square_root(self._grid, state)
        return health.report(T, W, self.ridge_left, self.samples, state.steps, self._recent)

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: mean squared error."""
        return functional.mse_loss(outputs, targets)

    @torch.no_grad()
    def update(
        self,
        features: Tensor,
        targets: Tensor,
        sample_weight: Tensor | None = None,
        *,
        identity: Tensor | None = None,
    ) -> None:
        """Score every candidate, then learn: features (..., in_features), targets (..., out_features).

        `identity` (b, ...) are the raw inputs by which samples are known again, b a divisor of their number; the
        features unless given. `held_out` then tells which rows were only scored. On bad input nothing changes.
        """
        self._ready()
        linear = owned_head("RLS", self.linear)
        check_rows(linear, features, targets, sample_weight)
        n = features.numel() // linear.in_features
        if identity is None:
            identity = features.reshape(n, -1)
        elif not identity.ndim or not len(identity) or n % len(identity):
            raise ValueError(
                f"identity must have one row a sample, or a divisor of {n} rows, got shape {tuple(identity.shape)}"
            )
        state = self._state
        codes = state.steps, state.first, state.unrepeated, self._salt
        found = look_up(self._seen, *codes, identity, targets, n)
        device = self._prior.device.type
        with torch.autocast(device, enabled=False):
            if not self._learn(linear, features, targets, sample_weight, found):
                raise explain_nonfinite(features, targets, linear)

    def _learn(
        self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None, found: Lookup
    ) -> bool:
        state, p, backend = self._state, self._prior.shape[1], self._backend()
        Phi, Y, total = samples(linear, features, targets, sample_weight, self._prior.dtype)
        n = len(Phi)
        X = torch.cat([Phi, Y], 1)
        moved = follow(linear, state.W[state.active]) - state.W[state.active]
        size, target_size, move = torch.stack(
            [Phi[:, : linear.in_features].square().sum(), Y.square().sum(), moved.square().sum()]
        ).tolist()
        if not math.isfinite(size + target_size + move):
            return False
        if move:
            state = candidates.moved(state, moved)
        scale = state.scale or candidates.power_of_ten(math.sqrt(size / (n * linear.in_features))) ** 2
        new = state._replace(
            score=backend.scored(self._grid, state, Phi, Y, target_size, found),
            scale=scale,
            first=found.first_code,
            unrepeated=found.unrepeated,
        )
        learning, held_out = len(found.held) < n, found.mask(n, features.device)
        names: list[int] = []
        if learning:
            if held_out is not None:
                X.masked_fill_(held_out[:, None], 0)
                lost = len(found.held) if sample_weight is None else sample_weight.reshape(-1)[found.held].sum()
                total -= float(lost)
            M, N, W, factor = backend.learned(self._grid, state, self._basis, X, scale)
            if not math.isfinite(float(W.abs().max())):
                return False
            turns = (rotation(p, lam) for lam in self._grid.lambdas)
            names = found.first_seen[: max(0, _SEEN_LIMIT - state.seen)]
            new = new._replace(
                M=M,
                N=N,
                W=W,
                factor=factor,
                steps=state.steps + 1,
                samples=tuple(lam * old + total for lam, old in zip(self._grid.lambdas, state.samples, strict=True)),
                cursors=tuple((old + c) % p for old, c in zip(state.cursors, turns, strict=True)),
                seen=len(self._seen.keys() | set(names)),
            )
        active = candidates.best(self._grid, new)
        new = new._replace(active=active)
        if new.history[-1][1] != active:
            new = new._replace(history=(*new.history, (new.steps, active))[-_HISTORY_LIMIT:])
        head = new.W[active].to(linear.weight.dtype)
        if not math.isfinite(float(head.abs().max())):
            return False
        before = self._state

        def write() -> None:
            self._seen.update(dict.fromkeys(names, new.steps))
            self._state, self._held_out = new, held_out
            store(linear, head)

        commit(write)
        if learning and before.steps % health.EVERY == 0:
            self._recent.note(Phi, before.W[before.active], before.steps)
        return True

    def _backend(self) -> Any:
        """The module whose functions compute an update."""
        if self.backend == "torch":
            return candidates
        from sepsa.heads.backends import numba_candidates

        return numba_candidates

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Hashable:
        """Bring the state to where captured updates write, of rows of the data set that `inputs` and `targets` are."""
        linear, captured = owned_head("RLS", self.linear), self._captured
        if captured is None or not captured.lies_in(linear):
            limits = _SEEN_LIMIT, _HISTORY_LIMIT
            captured = CapturedCandidates(linear, self._grid, self._ready(), self._basis, *limits)
        captured.finish()
        if inputs is not None and targets is not None:
            if not captured.holds(inputs, targets):
                self._ready()
            captured.open(inputs, targets, self._salt, self._seen, self._on_device)
        if not self._on_device:
            captured.load(self._ready())
        captured.follow()
        self._captured, self._on_device = captured, True
        return *captured.place, None if captured.table is None else captured.table.codes.data_ptr()

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        """`update` without a look from the host, of these `rows` (n,) of the data set; `held_out` is then a mask.

        Without `rows` the samples are hashed, which the host must look at: not inside a graph.
        """
        if self._captured is None or not self._on_device:
            raise RuntimeError("update_captured needs prepare_capture() first")
        if rows is None:
            self._seen = self._captured.read_seen(self._seen)
            rows = self._captured.hash(features, targets, self._salt, self._seen)
        fine, self._held_out = self._captured.update(features, targets, rows)
        return fine

    @torch.no_grad()
    def finish_captured(self) -> None:
        """What the last `update_captured` left: the candidates' state, which no forward or backward reads."""
        if self._captured is not None:
            self._captured.finish()


def grid_of(settings: tuple[tuple[float, float], ...], ridge: float | str, forgetting: float | str) -> Grid:
    """The grid of these settings, where what is not "auto" has one value."""
    if forgetting != "auto":
        in_range("forgetting", forgetting, 0.0, 1.0)  # type: ignore[arg-type]
    if ridge != "auto":
        in_range("ridge", ridge, 0.0, math.inf)  # type: ignore[arg-type]
    if forgetting == ridge == "auto":
        return Grid(settings)
    forgettings = [lam for lam, _ in settings] if isinstance(forgetting, str) else [float(forgetting)]
    ridges = [r for _, r in settings] if isinstance(ridge, str) else [float(ridge)]
    return Grid(tuple(dict.fromkeys((lam, r) for lam in forgettings for r in ridges)))
