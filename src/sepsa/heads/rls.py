"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

This file keeps the state and decides what runs. The mathematics is in `math.least_squares`, whose symbols are used
here; `backends` holds the compiled, recorded and captured versions of it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.backends.captured_least_squares import CapturedState
from sepsa.heads.base import checks, health
from sepsa.heads.base.checks import check_rows, explain_nonfinite, is_new_head, owned_head
from sepsa.heads.base.delta import Delta
from sepsa.heads.base.delta import learn as learn_delta
from sepsa.heads.base.delta import since as delta_since
from sepsa.heads.base.parameters import bias_words, commit, follow, join, ridges, samples, start, store
from sepsa.heads.base.posterior import NormalPosterior
from sepsa.heads.base.rls_state import RLSSettings, read_root, write_root
from sepsa.heads.math import least_squares, unlearning
from sepsa.heads.math.least_squares import PENDING, SAMPLES, STEPS, Root
from sepsa.heads.self_tuning import SelfTuningRLS
from sepsa.validation import in_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sepsa.heads.backends.cuda_graph import Replay
    from sepsa.heads.backends.numba_least_squares import Workspace

# Up to this p one compiled call costs less than torch's calls for the same arithmetic; for so many rows or more of a
# wider head than the second, torch's products are faster, but for about p rows of one up to the third.
_NUMBA_LIMIT, _ROWS, _NARROW, _WIDE = 256, 16, 96, 160


def suits_compilation(p: int, n: int) -> bool:
    """Whether one compiled call is faster than torch for n rows of a head of width p; docs/performance.md measures."""
    return p <= _NARROW or n < _ROWS or (p <= _WIDE and p / 4 <= n <= p)


class RLS(NormalPosterior):
    """Linear head by recursive least squares: an exact Newton step per update.

    Choose it for squared loss, whenever a p x p matrix is affordable. After any updates the head's weights
    are the minimizer of

        sum_i forgetting^age_i ||targets_i - W features_i||^2 + sum_j ridge_j ||W_j - prior_j||^2

    where `prior` is what the head held when it was bound, age counts updates, and ridge_j is `ridge`, kept
    alive however much is forgotten (see `restored_per_update`). So at forgetting 1 an `RLS` equals ridge
    regression about the initial weights on all data seen, in any order and in any batches. The bias is next to free,
    by `bias_ridge`: 1e-4 (1e-3 in float32), or the ridge where that is less; "ridge" holds it as it does the weights.

    Either setting, or both, may be "auto": then a `SelfTuningRLS` is made, which chooses by the errors it makes.
    Features and targets may come in any floating dtype; the arithmetic runs in `dtype`, float64 unless given.
    The state keeps a square root of the inverse curvature, which stays positive definite by construction.
    """

    learns_moments = True  # rows with equal second moments are equal to it: see sepsa.distributed
    forgets = True  # in the next update; see `sepsa.heads.Forgets`

    def __new__(cls, **settings: Any) -> Any:
        if "auto" in (settings.get("ridge"), settings.get("forgetting")):
            return SelfTuningRLS(**({"ridge": 1.0, "forgetting": 1.0} | settings))
        return object.__new__(cls)

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = 1.0,
        forgetting: float | Literal["auto"] = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ridge = in_range("ridge", cast(float, ridge), 0.0, math.inf)
        self.forgetting = in_range("forgetting", cast(float, forgetting), 0.0, 1.0)
        self.bias_ridge, self.dtype = checks.bias_setting(bias_ridge), checks.optional_dtype(dtype)
        self.linear: nn.Linear | None = None

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> RLS:
        """Own the curvature of `linear`; its present weights become the prior mean."""
        if not is_new_head("RLS", self.linear, linear):
            return self
        self._prior = start(linear, self.dtype)
        self._ridge = ridges(linear, self.ridge, self.bias_ridge, self._prior)
        self._root = least_squares.start(self._prior, self._ridge)
        self._counters = np.zeros(5)
        self._recent = health.Recent(self._prior)
        self._workspace: Workspace | Replay | None = None
        self._captured: CapturedState | None = None
        self._on_device = False  # whether the captured state is ahead of this one
        self._place: tuple[Any, ...] = ()  # where the head lay when the workspace was made
        self.linear = linear
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        root = self._state()
        settings = RLSSettings(self._prior, self.ridge, self.bias_ridge, self.forgetting)
        return write_root(root, self._counters, settings)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        self._state()
        linear = owned_head("RLS", self.linear)
        root, counters, settings = read_root(state_dict, linear, self._prior)
        ridge = ridges(linear, settings.ridge, settings.bias_ridge, self._prior)

        def write() -> None:
            self._prior, self.ridge, self.bias_ridge, self.forgetting = settings
            self._ridge, self._root, self._counters = ridge, root, counters
            self._workspace, self._captured, self._place, self._on_device = None, None, (), False
            self._recent = health.Recent(self._prior)

        commit(write)

    def to(self, device: torch.device | str | int) -> RLS:
        """Move the head and its curvature together."""
        owned_head("RLS", self.linear).to(device)
        self._state()
        return self

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        self._state()
        return int(self._counters[STEPS])

    @property
    def samples(self) -> float:
        """How many samples the head remembers: all it saw, weighted by forgetting^age."""
        self._state()
        return float(self._counters[SAMPLES])

    @property
    def ridge_left(self) -> Tensor:
        """The ridge (p,) that each coordinate has at the moment, between half of its own and all of it."""
        return self._state().left.clone()

    def objective(self) -> Tensor:
        """The minimum (m,) that the head's weights attain, one for each output."""
        return self._state().energy.clone()

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """B (p, p), the inverse of the curvature A; the bias, if there is one, is the last coordinate."""
        T = least_squares.square_root(self._state())
        B = T.T @ T
        return (B + B.T) / 2

    @property
    def backend(self) -> str:
        """What computes an update of one row: "numba", one compiled call, "graph", recorded kernels, or "torch"."""
        self._state()
        weight = owned_head("RLS", self.linear).weight
        return "numba" if self._can_compile(weight) else "graph" if weight.is_cuda else "torch"

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is None:
            return self.__dict__
        return self.__dict__ | {"_root": self._state(), "_workspace": None, "_captured": None, "_place": ()}

    def __repr__(self) -> str:
        linear = self.linear
        head = "" if linear is None else f", head={linear.in_features}->{linear.out_features}, backend={self.backend}"
        return f"RLS(ridge={self.ridge:g}, forgetting={self.forgetting:g}{bias_words(self.bias_ridge)}{head})"

    def _state(self) -> Root:
        """The state as it is now, where the head is."""
        linear = owned_head("RLS", self.linear)
        if self._on_device:
            assert self._captured is not None
            self._captured.finish()
            self._root, self._counters = self._captured.root, self._captured.counters()
            self._workspace, self._place, self._on_device = None, (), False
        device = linear.weight.device
        if self._workspace is not None:
            self._root = self._workspace.root
        if self._prior.device != device:
            self._workspace, self._place = None, ()
            self._prior, self._ridge = self._prior.to(device), self._ridge.to(device)
            self._root = self._root.map(lambda part: part.to(device))
        return self._root if self._counters[PENDING] else self._root._replace(H=None)

    def _can_compile(self, weight: Tensor) -> bool:
        fits = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64) and weight.is_contiguous()
        fits &= len(self._ridge) <= _NUMBA_LIMIT and self._prior.dtype == torch.float64
        return fits and importlib.util.find_spec("numba") is not None

    def _compiled(self, linear: nn.Linear, n: int) -> Workspace | Replay | None:
        """The workspace of the compiled update, where there is one for n rows of this head."""
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        assert weight is not None
        few = weight.is_cuda or suits_compilation(len(self._ridge), n)
        place = (weight.data_ptr(), None if bias is None else bias.data_ptr(), few)
        if place != self._place:  # the head moved to another device, dtype or memory, or other blocks come
            work: Workspace | Replay | None = None
            state = linear, self._state(), self._counters, self._prior, self._ridge
            if weight.is_cuda:
                from sepsa.heads.backends.cuda_graph import Replay

                work = Replay(*state)
            elif few and self._can_compile(weight):
                from sepsa.heads.backends.numba_least_squares import Workspace

                work = Workspace(*state)
            if work is not None:
                self._root, self._counters = work.root, work.counters
            self._workspace = work
            self._place = place  # last: an interrupt before lets the next update begin again
        return self._workspace

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: mean squared error."""
        return functional.mse_loss(outputs, targets)

    def restored_per_update(self, n: int) -> int:
        """How many coordinates get their ridge back in an update of n samples: all with n >= p/4, else p log2(1/λ).

        Forgetting takes the share 1 - λ of the ridge too, and an update gives it back, to all coordinates at once,
        A <- λA + (1 - λ) ridge I + ΦᵀΦ, or to a few in rotation, usually one, at O(p²): no coordinate ever falls
        under half of its ridge. The kernels of captured steps, up to 64 samples, restore in rotation whatever n is.
        """
        return least_squares.restored(len(self._ridge), n, self.forgetting)

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features).

        `sample_weight` (...) multiplies each sample's squared error. `forgetting` acts once per update, however many
        samples it has. On bad input an error is raised and nothing changes.
        """
        linear = owned_head("RLS", self.linear)
        if self._on_device:
            self._state()
        check_rows(linear, features, targets, sample_weight)
        steps, learned = int(self._counters[STEPS]), None
        before = self._root.W.clone() if steps % health.EVERY == 0 else None
        work = self._compiled(linear, features.numel() // linear.in_features)
        if work is not None:
            lam = self.forgetting if self.forgets else 1.0
            learned, Phi, Y, total = work.learn(features, targets, sample_weight, lam)
            self._root = work.root
        else:
            Phi, Y, total = samples(linear, features, targets, sample_weight, self._state().T.dtype)
        if learned is None:
            with torch.no_grad(), torch.autocast(self._prior.device.type, enabled=False):
                learned = self._learn_in_torch(linear, Phi, Y, total)
        if not learned:
            raise explain_nonfinite(features, targets, linear)
        if before is not None:
            self._recent.note(Phi, before, steps)

    def _learn_in_torch(self, linear: nn.Linear, Phi: Tensor, Y: Tensor, total: float) -> bool:
        root = self._state()
        root = root._replace(W=follow(linear, root.W))
        settings = self.forgetting if self.forgets else 1.0, self._ridge, self._prior, linear.weight.dtype
        learned = least_squares.learn(root, self._counters.tolist(), Phi, Y, total, *settings)
        if learned is not None:
            root, counters, head = learned
            self._take(root, np.array(counters), head)
        return learned is not None

    def _take(self, root: Root, counters: NDArray[np.float64], head: Tensor) -> None:
        """Make this the state, and `head` (m, p) the weights of the head."""
        linear = owned_head("RLS", self.linear)

        def write() -> None:
            work = self._workspace
            if work is not None:
                work.load(root, counters)
                self._root, self._counters = work.root, work.counters
            else:
                self._root, self._counters = root, counters
            store(linear, head)

        commit(write)

    def checkpoint(self) -> Any:
        """What `rollback` needs to undo the next update; cheap, because updates make new tensors or are small."""
        root, work = self._state(), self._workspace
        if work is not None and work.in_place:
            return work.checkpoint()
        return root, self._counters.copy(), join(owned_head("RLS", self.linear))

    def rollback(self, checkpoint: Any) -> None:
        """Be again, head included, as when `checkpoint` was taken."""
        self._state()
        self._take(*checkpoint)

    # ------------------------------------------------------------------ learning inside a CUDA graph

    @torch.no_grad()
    def prepare_capture(self) -> Hashable:
        """Bring the state to where captured updates write: the host may have learned or set the head since."""
        linear, captured = owned_head("RLS", self.linear), self._captured
        if captured is not None and captured.lies_in(linear):
            captured.finish()
        else:
            captured = CapturedState(linear, self._state())
        if not self._on_device:
            captured.load(least_squares.fade(self._state(), 1.0), self._counters)
        captured.W.copy_(follow(linear, captured.W))
        self._captured, self._on_device = captured, True
        return *captured.place, self.forgetting

    @torch.no_grad()
    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` without a look from the host: samples that are not finite change nothing, and the flag says so."""
        if self._captured is None or not self._on_device:
            raise RuntimeError("update_captured needs prepare_capture() first")
        return self._captured.update(features, targets, self.forgetting, self._ridge, self._prior)

    @torch.no_grad()
    def finish_captured(self) -> None:
        """What the last `update_captured` left, if anything: the curvature, which no forward or backward reads."""
        if self._captured is not None:
            self._captured.finish()

    # ------------------------------------------------------------------ exact arithmetic

    @torch.no_grad()
    def unlearn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Remove samples learned before, exactly, as if they had never been seen (at forgetting 1).

        Exact to a millionth, or refused with nothing changed: where it would leave less curvature than the prior has,
        or where the samples are so large that too few digits of the rest are left.
        """
        root, linear = self._state(), owned_head("RLS", self.linear)
        self._remembers_all("unlearn")
        check_rows(linear, features, targets, sample_weight)
        Phi, Y, total = samples(linear, features, targets, sample_weight, root.T.dtype)
        if not math.isfinite(float(Phi.square().sum() + Y.square().sum())):
            raise explain_nonfinite(features, targets, linear)
        seen = float(self._counters[SAMPLES])
        new = unlearning.unlearn(root._replace(W=follow(linear, root.W)), Phi, Y, total, seen, self._ridge)
        steps, _, cursor, _, _ = self._counters
        counters = np.array([steps, max(0.0, seen - total), cursor, 0.0, 0.0])
        self._take(new, counters, new.W.to(linear.weight.dtype))

    @torch.no_grad()
    def delta_since(self, mark: dict[str, Any] | None = None) -> Delta:
        """What was learned since `mark`, an earlier `state_dict()` of this head (None: since `bind`), to `merge`."""
        root, linear = self._state(), owned_head("RLS", self.linear)
        self._remembers_all("delta_since")
        root = root._replace(W=follow(linear, root.W))
        return delta_since(mark, linear, root, self._counters, self._prior, self._ridge)

    @torch.no_grad()
    def merge(self, other: RLS | Delta) -> None:
        """Become the head that saw this one's data and `other`'s, exactly, at forgetting 1 and one common prior."""
        if not isinstance(other, (RLS, Delta)):
            raise TypeError(f"other must be an RLS or a Delta, which delta_since returns, got {type(other).__name__}")
        root, linear = self._state(), owned_head("RLS", self.linear)
        self._remembers_all("merge")
        delta = other if isinstance(other, Delta) else other.delta_since()
        root, dtype = root._replace(W=follow(linear, root.W)), linear.weight.dtype
        new = learn_delta(root, delta, self._prior, self._ridge, dtype)
        steps, seen, cursor, _, _ = self._counters
        self._take(new, np.array([steps + delta.steps, seen + delta.samples, cursor, 0.0, 0.0]), new.W.to(dtype))

    def _remembers_all(self, verb: str) -> None:
        if self.forgetting != 1.0:
            raise ValueError(
                f"{verb} is exact only at forgetting 1, got {self.forgetting:g}: "
                "with forgetting, a head depends on when each sample came"
            )

    # ------------------------------------------------------------------ prediction

    def _weights(self) -> Tensor:
        return self._state().W

    def _spread(self) -> tuple[Tensor, Tensor, float]:
        root = self._state()
        return least_squares.square_root(root), root.energy, float(self._counters[SAMPLES])

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """What to look at when a run goes wrong, as numbers to log every hundred steps or so.

        `condition`, `smallest_eigenvalue`, `effective_samples`, `last_step`, `feature_drift`, `dead_features` and
        `silent_features`: docs/how-to-choose.md tells what each means and what to do.

        Those of the last updates know one update in eight, and are NaN before one and inside a captured step.
        """
        root = self._state()
        T = least_squares.square_root(root)
        return health.report(T, root.W, root.left, self.samples, self.steps, self._recent)
