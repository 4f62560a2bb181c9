"""Self-tuning recursive least squares: candidates over (λ, ridge), of which the best at new samples is active.

This file holds the state; the mathematics is in `candidates`, and `repeated_samples` finds samples that came before.
"""

from __future__ import annotations

import math
import warnings
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
    check_outputs,
    check_rows,
    explain_nonfinite,
    optional_dtype,
    ridge_setting,
)
from sepsa.heads.base.parameters import bias_words, commit, follow, join, samples, store
from sepsa.heads.base.posterior import NormalPosterior
from sepsa.heads.base.repeated_samples import UNREPEATED, BatchSplit, split_batch
from sepsa.heads.base.rls_state import Tuned, read_candidates, write_candidates
from sepsa.heads.math import candidates
from sepsa.heads.math.candidates import Candidates, Choice, Grid, Updated, basis_of
from sepsa.heads.math.ridge import due, next_cursor
from sepsa.heads.protocols import PrecisionWarning
from sepsa.validation import in_range

# The grid, by evidence: benchmarks/self_tuning.py. A ridge is relative to the squared size of the first features.
GRID = ((1.0, 0.1), (1.0, 3.0), (1.0, 1000.0), (0.98, 0.1), (0.98, 1000.0), (0.9, 0.1))
START = (1.0, 3.0)  # the candidate that is active before any has made a different error
# How many hashes of held-out samples, a tenth of the data set, and how many changes of the choice are remembered.
_SEEN_LIMIT = 2**17
_HISTORY_LIMIT = 1000
# Above this share of rounding errors in the predictions the head warns.
_LARGEST_SHARE = {torch.float64: 1e-7, torch.float32: 1e-3}


class SelfTuningRLS(NormalPosterior):
    """Recursive least squares that chooses its forgetting, its ridge, or both; `RLS(forgetting="auto")` makes it.

    Choose it where you do not know how fast the body or the data change, or how noisy the targets are. Each candidate
    equals the `RLS` of its settings. The candidate with the smallest recent error on samples before it learns them sets
    the head's weights; where errors differ only by chance, the one that remembers most. An update costs one Cholesky
    factorization of the curvature per candidate.

    Candidate ridges are relative to the mean square of the features in the first update, rounded to a power of ten.
    Samples that are learned again, as in a second epoch, no longer give an honest error. So a tenth of the samples,
    chosen by a hash, becomes a validation set when they repeat, and neither head nor body learns from them any more. A
    sample that never repeats exactly, as with data augmentation, always counts as new, and so do samples of data sets
    beyond 1.3 million rows.

    Args:
        ridge: A number, or "auto" to choose it.
        forgetting: A number in (0, 1], or "auto" to choose it.
        bias_ridge: As for `RLS`; the same for all candidates.
        dtype: As for `RLS`.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `RLS`, which costs less and keeps more digits where the settings are known.

    Examples:
        >>> import torch
        >>> from sepsa import RLS
        >>> _ = torch.manual_seed(0)
        >>> head = RLS(forgetting="auto", ridge="auto").bind(torch.nn.Linear(2, 1))
        >>> for step in range(100):
        ...     features = torch.randn(8, 2)
        ...     head.update(features, features.sum(1, keepdim=True))
        >>> head.forgetting  # the data do not change
        1.0
    """

    _replaced = ("_state", "_held_out")
    _warned = False  # of rounding errors

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
        self._held_out: Tensor | None = None

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        dtype = self.dtype or (torch.float32 if linear.weight.device.type == "mps" else torch.float64)
        if linear._parameters["bias"] is None:
            self._grid = self._grid._replace(bias_ridge="ridge")
        self._prior = prior = join(linear).to(dtype)
        self._basis = basis_of(prior)
        self._seen: dict[int, int] = {}  # the hash of a sample that may be held out: the update that learned it
        # Another seed holds out another tenth.
        self._salt = 0 if prior.is_meta else zlib.crc32(prior.cpu().numpy().tobytes())
        self._recent = health.Recent(prior)
        start = self._grid.settings.index(START) if START in self._grid.settings else 0
        scale = 0.0 if self._settings["ridge"] == "auto" else 1.0
        self._state = candidates.start(self._grid, prior, scale, start, UNREPEATED)
        self._captured: CapturedCandidates | None = None
        self._on_device = False  # whether the captured state is ahead of this one

    def state_dict(self) -> dict[str, Any]:
        """Return the candidates, their scores and the hashes of samples, without the head's weights."""
        return write_candidates(self._read(), Tuned(self._grid, self._prior, self._salt, self._seen))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver with the same candidates, whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        state = self._read()
        new, tuned = read_candidates(state_dict, state, Tuned(self._grid, self._prior, self._salt, self._seen))
        if new.steps:
            compiled = self._compiled()
            factor = None if compiled is None else compiled.factored(tuned.grid, new)
            if factor is None:
                factor, _ = candidates.factors(tuned.grid, new.M, new.N, new.scale)
            new = new._replace(factor=factor)
        attributes: dict[str, Any] = {
            "_grid": tuned.grid,
            "_prior": tuned.prior,
            "_salt": tuned.salt,
            "_seen": tuned.seen,
        }
        recent = health.Recent(tuned.prior)
        self._assign(**attributes, _state=new, _basis=basis_of(tuned.prior), _captured=None, _recent=recent)

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state and the head's weights as they were at a checkpoint.

        Args:
            checkpoint: The result of `checkpoint`.
        """
        super().rollback(checkpoint)
        for sample in list(self._seen)[self._state.seen :]:
            self._seen.pop(sample, None)

    @property
    def backend(self) -> str:
        """The backend of an update: "numba", compiled loops, or "torch"."""
        prior = self._prior
        return choose("candidates", Case(prior.device.type, prior.dtype, prior.shape[1])).backend

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is not None:
            self._read()
        return self.__dict__ | {"_captured": None}  # CUDA graphs write to the original's memory

    def __repr__(self) -> str:
        ridge, forgetting = (
            '"auto"' if value == "auto" else f"{value:g}"
            for value in (self._settings["ridge"], self._settings["forgetting"])
        )
        words = bias_words(self._settings["bias_ridge"]) + self._shape_words()
        return f"RLS(ridge={ridge}, forgetting={forgetting}{words})"

    def _ready(self) -> nn.Linear:
        self._read()
        return self._head()

    def _read(self) -> Candidates:
        """The current state, read back from captured updates, on the device of the head."""
        device = self._head().weight.device
        if self._on_device:
            assert self._captured is not None
            self._state, self._seen = self._captured.read(self._state), self._captured.read_seen(self._seen)
            self._on_device = False
            self._warn_of_rounding(now=True)
        if self._prior.device != device:
            self._prior, self._basis = self._prior.to(device), self._basis.to(device)
            self._state = candidates.placed(self._state, device)
        return self._state

    # ------------------------------------------------------------------ the choice

    @property
    def members(self) -> list[tuple[float, float]]:
        """The candidates: (forgetting, ridge) of each."""
        scale = self._read().scale or 1.0
        return [(lam, r * scale) for lam, r in self._grid.settings]

    @property
    def chosen(self) -> list[Choice]:
        """The last 1,000 changes of the active candidate as (update, forgetting, ridge); the last one is active."""
        members = self.members
        return [Choice(step, *members[member]) for step, member in self._state.history]

    @property
    def scores(self) -> dict[tuple[float, float], float]:
        """The recent mean squared error of each (forgetting, ridge) on samples before they were learned, outliers
        clipped.
        """
        score = self._read().score
        return dict(zip(self.members, (score[:-1, -1] / score[-1, -1]).tolist(), strict=True))

    @property
    def forgetting(self) -> float:
        """The forgetting of the active candidate."""
        return self._grid.settings[self._read().active][0]

    @property
    def ridge(self) -> float:
        """The ridge of the active candidate."""
        return self.members[self._state.active][1]

    @property
    def held_out(self) -> Tensor | None:
        """A mask (n,) of the samples of the last update that were held out; None if there were none."""
        return self._held_out

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return self._read().steps

    @property
    def samples(self) -> float:
        """The number of samples that the active candidate remembers."""
        state = self._read()
        return state.samples[self._grid.lambda_index[state.active]]

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return the weights W (candidates, m, p) of all candidates."""
        return self._read().W.clone()

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return B (p, p) of the active candidate, as `RLS.covariance` does."""
        T = candidates.square_root(self._grid, self._read())
        B = T.T @ T
        return (B + B.T) / 2

    @torch.no_grad()
    def objective(self) -> Tensor:
        """Return the minimum (m,) of the active candidate's objective, one number per output."""
        return candidates.minimum(self._grid, self._read())

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) of each coordinate of the active candidate at present."""
        state = self._read()
        return candidates.active_ridge(self._grid, state) * state.N[self._grid.lambda_index[state.active], 0]

    def _weights(self) -> Tensor:
        state = self._read()
        return state.W[state.active]

    def _spread(self) -> tuple[Tensor, Tensor, float]:
        return candidates.square_root(self._grid, self._read()), self.objective(), self.samples

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Return the numbers of `RLS.health` for the active candidate."""
        state = self._read()
        W, T = state.W[state.active], candidates.square_root(self._grid, state)
        return health.report(T, W, self.ridge_left, self.samples, state.steps, self._recent)

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error, the loss that the head minimizes, for the body to follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: Targets of the same shape.

        Returns:
            A scalar.
        """
        check_outputs(outputs, targets)
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
        """Score every candidate on samples as one block, then learn them.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).
            sample_weight: Factor (...) on each sample's squared error.
            identity: Inputs (b, ...) by which samples are recognized when they repeat, b a divisor of the number of
                samples; None for the features. `SepSA` passes the model's inputs.

        Raises:
            NotFinite: A value is NaN, infinite or too large; nothing was learned.
            ValueError: A shape is wrong; nothing was learned.
        """
        self._read()
        linear = self._head()
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
        split = split_batch(self._seen, *codes, identity, targets, n)
        with torch.autocast(self._prior.device.type, enabled=False):
            if not self._learn(linear, features, targets, sample_weight, split):
                raise explain_nonfinite(features, targets, linear)

    def _learn(
        self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None, split: BatchSplit
    ) -> bool:
        """Learn the batch and store the head; False, and nothing changes, where a number is not finite."""
        before = state = self._state
        Phi, Y, total = samples(linear, features, targets, sample_weight, self._prior.dtype)
        n, p = Phi.shape
        delta = follow(linear, state.W[state.active]) - state.W[state.active]
        size, target_size, move = torch.stack(
            [Phi[:, : linear.in_features].square().sum(), Y.square().sum(), delta.square().sum()]
        ).tolist()
        if not math.isfinite(size + target_size + move):
            return False
        if move:
            state = state._replace(**candidates.moved(state.statistics, delta)._asdict())
        scale = state.scale or candidates.power_of_ten(math.sqrt(size / (n * linear.in_features))) ** 2
        state = state._replace(scale=scale)
        updated = self._updated(state, Phi, Y, split, linear.weight.dtype)
        if not updated.valid:
            return False
        active, learns = int(updated.active), len(split.held_out) < n
        new = state._replace(**updated.statistics._asdict())
        new = new._replace(active=active, first=split.first_code, unrepeated=split.unrepeated)
        hashes: list[int] = []
        if learns:
            if split.held_out:
                lost = len(split.held_out) if sample_weight is None else sample_weight.reshape(-1)[split.held_out].sum()
                total -= float(lost)
            hashes = split.new_hashes[: max(0, _SEEN_LIMIT - state.seen)]
            lambdas = self._grid.lambdas
            new = new._replace(
                steps=state.steps + 1,
                samples=tuple(lam * old + total for lam, old in zip(lambdas, state.samples, strict=True)),
                cursors=tuple(
                    next_cursor(old, due(p, lam), p) for lam, old in zip(lambdas, state.cursors, strict=True)
                ),
                seen=len(self._seen.keys() | set(hashes)),
            )
        if new.history[-1][1] != active:
            new = new._replace(history=(*new.history, (new.steps, active))[-_HISTORY_LIMIT:])
        held_out = split.held_out_mask(n, features.device)

        def write() -> None:
            self._seen.update(dict.fromkeys(hashes, new.steps))
            self._state, self._held_out = new, held_out
            store(linear, updated.head)

        commit(write)
        self._warn_of_rounding()
        if learns and before.steps % health.EVERY == 0:
            self._recent.note(Phi, before.W[before.active], before.steps)
        return True

    def _warn_of_rounding(self, now: bool = False) -> None:
        """Warn once if the sums that candidates share have lost digits; checked at the first updates and at every
        eighth.
        """
        steps = self._state.steps
        if self._warned or not steps or not (now or steps <= health.EVERY or steps % health.EVERY == 0):
            return
        share = float(candidates.rounding(self._grid, self._state))
        if share > _LARGEST_SHARE[self._prior.dtype]:
            self._warned = True
            warnings.warn(
                f"about {share:.0e} of this head's predictions is rounding error, because its features have large "
                "offsets or nearly agree: standardize them, or give RLS a ridge and a forgetting, with which it keeps "
                "all digits",
                PrecisionWarning,
                stacklevel=3,
            )

    def _updated(self, state: Candidates, Phi: Tensor, Y: Tensor, split: BatchSplit, dtype: torch.dtype) -> Updated:
        """The candidates after an update, by compiled loops where they apply and by torch elsewhere."""
        compiled = self._compiled()
        new = None if compiled is None else compiled.updated(self._grid, state, self._basis, Phi, Y, split, dtype)
        if new is None:
            grid, masks = candidates.tensors_like(self._grid, state.N), split.masks(len(Phi), Phi.device)
            numbers = state.scale, state.active, torch.tensor(state.cursors, device=Phi.device)
            new = candidates.updated(grid, state.statistics, self._basis, Phi, Y, *numbers, masks, dtype, wait=True)
        return new

    def _compiled(self) -> Any:
        """The module of compiled loops; None where torch computes updates."""
        if self.backend == "torch":
            return None
        from sepsa.heads.backends import numba_candidates

        return numba_candidates

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
        linear, captured = self._head(), self._captured
        if captured is None or not captured.lies_in(linear):
            limits = _SEEN_LIMIT, _HISTORY_LIMIT
            captured = CapturedCandidates(linear, self._grid, self._read(), self._basis, *limits)
        captured.finish()
        if inputs is not None and targets is not None:
            if not captured.indexes(inputs, targets):
                self._read()
            captured.use(inputs, targets, self._salt, self._seen, self._on_device)
        if not self._on_device:
            captured.load(self._read())
        captured.follow()
        self._captured, self._on_device = captured, True
        return *captured.place, None if captured.index is None else captured.index.codes.data_ptr()

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
        if self._captured is None or not self._on_device:
            raise RuntimeError("update_captured needs prepare_capture() first")
        if rows is None:
            self._seen = self._captured.read_seen(self._seen)
            rows = self._captured.use_batch(features, targets, self._salt, self._seen)
        valid, self._held_out = self._captured.update(features, targets, rows)
        return valid

    @torch.no_grad()
    def finish_captured(self) -> None:
        """Write the candidates' state after the last `update_captured`; no forward or backward pass reads it."""
        if self._captured is not None:
            self._captured.finish()


def grid_of(settings: tuple[tuple[float, float], ...], ridge: float | str, forgetting: float | str) -> Grid:
    """The grid of candidates, in which a setting that is not "auto" has one value."""
    if forgetting != "auto":
        in_range("forgetting", forgetting, 0.0, 1.0)  # type: ignore[arg-type]
    if ridge != "auto":
        ridge_setting(ridge)
    if forgetting == ridge == "auto":
        return Grid(settings)
    forgettings = [lam for lam, _ in settings] if isinstance(forgetting, str) else [float(forgetting)]
    ridges = [r for _, r in settings] if isinstance(ridge, str) else [float(ridge)]
    return Grid(tuple(dict.fromkeys((lam, r) for lam in forgettings for r in ridges)))
