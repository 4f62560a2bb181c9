"""Recursive least squares: the stochastic Newton method of the paper's equations 12-18.

Symbols: Φ (n, p) features, with a last column of ones where the head has a bias; Y (n, m) targets; W (m, p)
the head; A (p, p) the curvature, B = A⁻¹; λ the forgetting. State: Z = [T; W] and H with B = TᵀH⁻¹T, where H is
the identity, so that T is a square root of B, except between large batches, which gather in H.

The mathematics is written once, for arrays: tensors, or on a CPU with small p the NumPy arrays over the same
memory, because there the price of a step is the price of its calls and NumPy's cost a third of torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads._checks import (
    check_keys,
    check_rows,
    check_state_tensor,
    explain_nonfinite,
    in_range,
    is_new_head,
    owned_head,
)

Array = Any  # a torch.Tensor, or a numpy.ndarray over the same memory

# Above this squared size the product FFᵀ swallows the identity it is added to; the QR route does not.
_PRODUCT_LIMIT = 1e10
# Above this p NumPy's BLAS starts threads, which then fight with torch's for the same cores.
_NUMPY_LIMIT = 64
# Below so many rows, one after the other costs less than one block.
_ROW_LIMIT = 4
# H is absorbed into T when it has grown by this factor, or fallen by its inverse, or after so many updates.
_GROWTH_LIMIT = 1e6
_PENDING_LIMIT = 256
# `health` knows one update in so many, up to so many rows of it, and of those rows the last so many.
_EVERY, _RECENT = 8, 32


class Posterior(NamedTuple):
    """A prediction and its standard deviation, both (..., out_features)."""

    mean: Tensor
    std: Tensor


class RLS:
    """Linear head by recursive least squares: an exact Newton step per update.

    Choose it for squared loss, whenever a p x p matrix is affordable. After any updates the head's weights
    are the minimizer of

        sum_i forgetting^age_i ||targets_i - W features_i||^2 + sum_j ridge_j ||W_j - prior_j||^2

    where `prior` is what the head held when it was bound, age counts updates, and ridge_j is `ridge`, kept
    alive however much is forgotten (see `restored_per_update`). So at forgetting 1 an `RLS` equals ridge
    regression about the initial weights on all data seen, in any order and in any batches.

    Either setting, or both, may be "auto": then the solver is a `SelfTuningRLS`, which chooses by the errors it makes.

    Features and targets may come in any floating dtype; the arithmetic runs in `dtype`, float64 unless given.
    The state keeps a square root of the inverse curvature, which stays positive definite by construction.
    """

    _TENSORS: tuple[str, ...] = ("_Z", "_H", "_energy", "_ridge_left", "_prior")
    _NUMBERS: tuple[str, ...] = ("ridge", "forgetting", "_steps", "_cursor", "_mass", "_pending", "_growth")

    def __new__(cls, **settings: Any) -> RLS:
        if cls is RLS and "auto" in (settings.get("ridge"), settings.get("forgetting")):
            from sepsa.heads.bank import SelfTuningRLS

            return object.__new__(SelfTuningRLS)
        return object.__new__(cls)

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = 1.0,
        forgetting: float | Literal["auto"] = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.ridge = in_range("ridge", cast(float, ridge), 0.0, math.inf)
        self.forgetting = in_range("forgetting", cast(float, forgetting), 0.0, 1.0)
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
        self.dtype = dtype
        self.linear: nn.Linear | None = None

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> RLS:
        """Own the curvature of `linear`; its present weights become the prior mean."""
        if not is_new_head("RLS", self.linear, linear):
            return self
        self.linear = linear
        device = linear.weight.device
        dtype = self.dtype or (torch.float32 if device.type == "mps" else torch.float64)
        m, p = linear.out_features, linear.in_features + (linear.bias is not None)
        self._steps = 0
        self._unfinished: Tensor | None = None  # a block of which the head has learned, but not yet the curvature
        self._away = False  # whether steps, mass and cursor are counted on the device, in the desk's tally
        self._cursor = 0  # the coordinate whose turn it is to get its ridge back
        self._mass = 0.0  # the samples seen, less what was forgotten of them
        self._Z = torch.zeros(p + m, p, dtype=dtype, device=device)
        self._Z[:p].diagonal().fill_(1 / math.sqrt(self.ridge))
        self._H = torch.eye(p, dtype=dtype, device=device)
        self._pending, self._growth = 0, 0.0  # the updates gathered in H, and the trace they added
        self._energy = torch.zeros(m, dtype=dtype, device=device)  # the objective at its minimum, per output
        self._ridge_left = torch.full((p,), self.ridge, dtype=dtype, device=device)
        self._prior = torch.zeros(m, p, dtype=dtype, device=device)
        self._desk = Desk(self, linear)
        self._desk.read()
        self._prior.copy_(self._desk.weights)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        self._ready()
        state: dict[str, Any] = {name.lstrip("_"): getattr(self, name).clone() for name in self._TENSORS}
        return state | {name.lstrip("_"): getattr(self, name) for name in self._NUMBERS}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        self._ready()
        keys = {name.lstrip("_") for name in self._TENSORS + self._NUMBERS}
        check_keys("RLS", state_dict, keys)
        for name in self._TENSORS:
            key, shape = name.lstrip("_"), tuple(getattr(self, name).shape)
            check_state_tensor(key, state_dict[key], shape)
        in_range("ridge", state_dict["ridge"], 0.0, math.inf)
        in_range("forgetting", state_dict["forgetting"], 0.0, 1.0)
        for name in self._NUMBERS:
            setattr(self, name, state_dict[name.lstrip("_")])
        for name in self._TENSORS:
            getattr(self, name).copy_(state_dict[name.lstrip("_")])

    def to(self, device: torch.device | str | int) -> RLS:
        """Move the head and its curvature together."""
        self._bound().to(device)
        self._ready()
        return self

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        self._ready()
        return self._steps

    @property
    def samples(self) -> float:
        """How many samples the head remembers: all it saw at forgetting 1, weighted by forgetting^age below."""
        self._ready()
        return self._mass

    def covariance(self) -> Tensor:
        """B (p, p), the inverse of the curvature A; the bias, if there is one, is the last coordinate."""
        self._ready()
        T = self._root()
        B = T.T @ T
        return (B + B.T) / 2

    def _root(self) -> Tensor:
        """T with TᵀT = B, whatever is pending; the state stays as it is."""
        T = self._Z[: self._Z.shape[1]]
        return torch.linalg.solve_triangular(torch.linalg.cholesky(self._H), T, upper=False) if self._pending else T

    def __getstate__(self) -> dict[str, Any]:
        if self.linear is not None:
            self._ready()
        return {name: value for name, value in self.__dict__.items() if name != "_desk"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.linear is not None:
            self._desk = Desk(self, self.linear)

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        return f"RLS(ridge={self.ridge:g}, forgetting={self.forgetting:g}{head})"

    def _bound(self) -> nn.Linear:
        return owned_head("RLS", self.linear)

    def _ready(self) -> Desk:
        """The work space, laid out anew when the head has moved to another device, dtype or memory."""
        linear = self._bound()
        if self._away:
            self.finish_on_device()
            steps, self._mass, cursor = self._desk.tally.tolist()
            self._steps, self._cursor = int(steps), int(cursor) % self._Z.shape[1]
            self._away = False
        if not self._desk.fits(linear):
            for name in self._TENSORS:
                setattr(self, name, getattr(self, name).to(linear.weight.device))
            self._desk = Desk(self, linear)
        return self._desk

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: mean squared error."""
        return functional.mse_loss(outputs, targets)

    def restored_per_update(self, n: int) -> int:
        """How many coordinates get their ridge back in an update of n samples: min(p, max(4n - 3, p log2(1/λ))).

        Forgetting takes the share 1 - λ of the ridge too. An update gives it back to this many coordinates, in
        rotation, as further rows of the same block. With n > p/4 samples these are all coordinates, so that
        A <- λA + (1 - λ) ridge I + ΦᵀΦ to the letter. With one sample they are few, usually one, which keeps
        the update at O(p²), and yet no coordinate ever falls under half of its ridge.
        """
        return restored(self._Z.shape[1], n, self.forgetting)

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features).

        `sample_weight` (...) multiplies each sample's squared error. `forgetting` acts once per update,
        however many samples it has. On bad input an error is raised and nothing changes.
        """
        desk = self._ready()
        check_rows(desk.linear, features, targets, sample_weight)
        if torch.is_autocast_enabled(desk.device):
            with torch.autocast(desk.device, enabled=False):
                self._learn(desk, features, targets, sample_weight)
        else:
            self._learn(desk, features, targets, sample_weight)

    def _learn(self, desk: Desk, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> None:
        Phi, Y, mass = desk.samples(features, targets, sample_weight)
        n, p = Phi.shape
        lam, c = self.forgetting, self.restored_per_update(n)
        turn = [(self._cursor + i) % p for i in range(c)] if c else []
        single = n == 1 and c < _ROW_LIMIT
        if c and not single:
            Phi, Y = desk.with_ridge(Phi, Y, turn, self.ridge, lam)
        if desk.numpy and not math.isfinite(desk.square(Phi)):  # NumPy would warn of it in words of its own
            raise explain_nonfinite(features, targets, desk.linear)
        desk.read()
        F, E = desk.whiten(Phi, Y)
        size = desk.square(F)
        if not math.isfinite(size + desk.square(E)):
            raise explain_nonfinite(features, targets, desk.linear)

        # From here on nothing can fail, so the state changes.
        if self._steps % _EVERY == 0:
            desk.remember(Phi[:n], self._steps)  # without the rows of the ridge
        self._steps += 1
        self._mass = lam * self._mass + mass
        if c:
            self._cursor = (self._cursor + c) % p
            desk.H *= lam
            desk.energy *= lam
            desk.ridge_left *= lam
            self._growth *= lam
        if size > desk.product_limit:
            self._absorb(desk, lam)
            for i in range(0, Phi.shape[0], p):
                few_rows(desk, *desk.whiten(Phi[i : i + p], Y[i : i + p]), large=True)
        elif 4 * Phi.shape[0] >= p and not single:
            many_rows(desk, F, E)
            self._pending += 1
            self._growth += size
            fallen = lam**self._pending * desk.growth_limit < 1
            if fallen or self._growth > desk.growth_limit * p or self._pending >= _PENDING_LIMIT:
                self._absorb(desk, 1.0)
        else:
            if self._absorb(desk, lam):
                F, E = desk.whiten(Phi, Y)
            if single:
                rank_one(desk, F[:, 0], E[0])
                for j in turn:
                    root = math.sqrt(max(0.0, self.ridge - float(desk.ridge_left[j])))
                    rank_one(desk, root * desk.T[:, j], root * (desk.prior[:, j] - desk.W[:, j]))
            else:
                few_rows(desk, F, E)
        if c:
            desk.ridge_left[turn] = self.ridge
        desk.write()

    def _absorb(self, desk: Desk, lam: float) -> bool:
        """Make T the root of B again, with H = I. True where T changed."""
        if self._pending:
            torch.linalg.solve_triangular(torch.linalg.cholesky(self._H), desk.root, upper=False, out=desk.root)
        elif lam < 1.0:
            desk.root.mul_(1 / math.sqrt(lam))
        else:
            return False
        self._H.zero_()
        self._H.diagonal().fill_(1)
        self._pending, self._growth = 0, 0.0
        return True

    # ------------------------------------------------------------------ learning inside a CUDA graph

    def prepare_on_device(self) -> None:
        """Bring what `update_on_device` needs to the device: the host may have learned or set the head since."""
        self.finish_on_device()
        if not self._away or not self._desk.fits(self._bound()):
            desk = self._ready()
            self._absorb(desk, 1.0)
            desk.tally.copy_(torch.tensor([self._steps, self._mass, self._cursor], dtype=torch.float64))
            self._away = True
        self._desk.read()

    def update_on_device(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` without a look from the host: samples that are not finite change nothing, and the flag says so.

        Part of it may be left for `finish_on_device`, which comes first where nobody called it in between.
        """
        self.finish_on_device()
        desk, lam, tally = self._desk, self.forgetting, self._desk.tally
        Z, T = desk.Z, desk.T
        p, dtype = Z.shape[1], Z.dtype
        x, Y = features.detach().reshape(-1, desk.k), targets.detach().reshape(-1, desk.W.shape[0])
        n = x.shape[0]
        c = self.restored_per_update(n)
        if n == 1 and c == 0 and desk.fused is not None:
            fine: Tensor = desk.fused.rank_one(desk, x, Y)
            return fine
        if c == 0 and desk.fused is not None and desk.fused.takes_block(n, Y.shape[1]):
            self._unfinished, fine = desk.fused.block(desk, x, Y)
            return fine
        x, Y = x.to(dtype), Y.to(dtype)
        Phi = x if desk.k == p else torch.cat([x, x.new_ones(n, 1)], 1)
        if c:
            turn = (tally[2].long() + torch.arange(c, device=Z.device)) % p
            root = (self.ridge - lam * desk.ridge_left[turn]).clamp(min=0).sqrt()[:, None]
            Phi = torch.cat([Phi, Z.new_zeros(c, p).scatter_(1, turn[:, None], root)])
            Y = torch.cat([Y, desk.prior[:, turn].T * root])
        F, E = desk.whiten(Phi, Y)
        fine = (F.square().sum() + E.square().sum()).isfinite()
        F, E = F.where(fine, 0.0), E.where(fine, 0.0)  # rows of zeros teach nothing
        if c:
            fade = torch.where(fine, lam, 1.0).to(dtype)
            tally[1].mul_(fade)
            T.div_(fade.sqrt())
            F = F / fade.sqrt()
            desk.energy.mul_(fade)
            faded = (desk.ridge_left * lam).index_fill(0, turn, self.ridge)
            desk.ridge_left.copy_(faded.where(fine, desk.ridge_left))
        if Phi.shape[0] == 1:
            rank_one(desk, F[:, 0], E[0])
        else:
            few_rows(desk, F, E)
        tally.add_(fine * desk.increment(n, c))
        desk.write()
        return fine

    def finish_on_device(self) -> None:
        """What the last `update_on_device` left, if anything: the curvature, which no forward or backward reads."""
        if self._unfinished is None:
            return
        n, p = len(self._unfinished), self._Z.shape[1]
        gram, U, Ft = torch.split_with_sizes(self._unfinished, [n, p, p], 1)
        C = torch.linalg.cholesky_ex(gram).L
        V = torch.linalg.solve_triangular(C, U, upper=False)
        C.diagonal().add_(1)
        V = torch.linalg.solve_triangular(C.T, V, upper=True)
        self._desk.root.addmm_(Ft.T, V, alpha=-1)  # as in `few_rows`
        self._unfinished = None

    # ------------------------------------------------------------------ exact arithmetic on what was learned

    @torch.no_grad()
    def unlearn(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Remove samples learned before, exactly, as if they had never been seen (at forgetting 1).

        Refused, with nothing changed, where it would leave less curvature than the prior alone has: such
        samples were not learned by this head.
        """
        desk = self._ready()
        self._remembers_all("unlearn")
        check_rows(desk.linear, features, targets, sample_weight)
        samples = desk.samples(features, targets, sample_weight)
        Phi, Y, mass = as_tensor(samples[0]), as_tensor(samples[1]), samples[2]
        desk.read()
        T, W = self._root(), desk.weights
        F, E = Phi @ T.T, Y - Phi @ W.T
        if not math.isfinite(float(F.square().sum() + E.square().sum())):
            raise explain_nonfinite(features, targets, desk.linear)
        H = torch.eye(T.shape[0], dtype=T.dtype, device=T.device) - F.T @ F  # T(A - ΦᵀΦ)Tᵀ
        beyond_prior = float(torch.linalg.eigvalsh(H - self.ridge * (T @ T.T))[0])
        tolerance = math.sqrt(torch.finfo(T.dtype).eps)
        C, info = torch.linalg.cholesky_ex(H)
        if beyond_prior < -tolerance or int(info) or mass > (1 + tolerance) * self._mass:
            raise ValueError(
                f"features: removing these {Phi.shape[0]} samples would leave less curvature than the prior has "
                f"(smallest relative eigenvalue {beyond_prior:.3g}; the head remembers {self._mass:g} samples): "
                "unlearn only what this head learned, with the same features and weights"
            )
        T = torch.linalg.solve_triangular(C, T, upper=False)
        self._replace_root(desk, T)
        step = (T @ (Phi.T @ E)).T @ T
        W.sub_(step)
        self._energy.sub_((E * (E + Phi @ step.T)).sum(0)).clamp_(min=0)
        self._mass = max(0.0, self._mass - mass)
        desk.write()

    @torch.no_grad()
    def merge(self, other: RLS) -> None:
        """Become the head that saw this one's data and `other`'s: exact at forgetting 1 and one common prior."""
        mine, theirs = self._ready(), other._ready()
        self._remembers_all("merge")
        other._remembers_all("merge")
        if other._prior.shape != self._prior.shape:
            raise ValueError(
                f"other must have a head of shape {tuple(self._prior.shape)}, got {tuple(other._prior.shape)}"
            )
        if other.ridge != self.ridge or not torch.equal(other._prior.to(self._prior), self._prior):
            raise ValueError(
                f"other must have started from the same prior, ridge {self.ridge:g} and the same initial weights, "
                f"got ridge {other.ridge:g} and its own: bind both to copies of one head before they learn"
            )
        mine.read()
        theirs.read()
        T, W = self._root(), mine.weights
        T2, W2 = other._root().to(T), theirs.weights.to(W)
        R = torch.linalg.inv(T2).T  # A₂ = RᵀR
        V = R @ T.T
        H = V.T @ V - self.ridge * (T @ T.T)
        H.diagonal().add_(1)  # T(A₁ + A₂ - ridge I)Tᵀ
        root = torch.linalg.solve_triangular(torch.linalg.cholesky(H), T, upper=False)
        pull = (W2 - W) @ R.T @ R + self.ridge * (W - self._prior)
        merged = W + pull @ root.T @ root
        # Both objectives at the common minimum, with the prior counted once.
        rise = torch.linalg.solve(T.T, (merged - W).T).square().sum(0) + (R @ (merged - W2).T).square().sum(0)
        self._energy.add_(other._energy.to(T)).add_(rise)
        self._energy.sub_(self.ridge * (merged - self._prior).square().sum(1)).clamp_(min=0)
        self._mass += other._mass
        self._steps += other._steps
        self._replace_root(mine, root)
        W.copy_(merged)
        mine.write()

    def _replace_root(self, desk: Desk, T: Tensor) -> None:
        self._absorb(desk, 1.0)
        desk.root.copy_(T)

    def _remembers_all(self, verb: str) -> None:
        if self.forgetting != 1.0:
            raise ValueError(f"{verb} is exact only at forgetting 1, got {self.forgetting:g}")

    # ------------------------------------------------------------------ prediction

    @torch.no_grad()
    def predict(self, features: Tensor, return_std: bool = False) -> Tensor | Posterior:
        """Predict (..., out_features); with `return_std` also the predictive standard deviation.

        The variance is σ²(1 + hᵀBh), with σ² the noise that the errors made while learning show.
        """
        desk = self._ready()
        linear = desk.linear
        check_rows(linear, features)
        Phi = as_tensor(desk.rows(features))
        if not math.isfinite(float(Phi.square().sum())):
            raise explain_nonfinite(features, None, linear)
        shape = (*features.shape[:-1], linear.out_features)
        desk.read()
        mean = (Phi @ desk.weights.T).reshape(shape).to(linear.weight.dtype)
        if not return_std:
            return mean
        if self._mass == 0:
            raise ValueError("return_std needs at least one update: before it the noise is unknown")
        spread = 1 + (Phi @ self._root().T).square().sum(1, keepdim=True)
        noise = self._energy.clamp(min=0) / self._mass  # rounding can leave a fit without error below zero
        std = (spread * noise).sqrt().reshape(shape).to(linear.weight.dtype)
        return Posterior(mean, std)

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """What to look at when a run goes wrong, as numbers to log every hundred steps or so.

        - `condition`, the curvature's largest over its smallest eigenvalue, estimated. Above 1e10 in float64, or 1e5
          in float32, digits are lost: raise `ridge`, or normalize the features.
        - `smallest_eigenvalue` of the curvature. Near `ridge`: some direction was never seen, and there the ridge alone
          decides. That is harmless, unless predictions must hold in that direction.
        - `effective_samples`, what the head remembers. Below the number of features it cannot tell signal from noise:
          raise `forgetting` or `ridge`.
        - `last_step`, the norm of the weights' change in an update, on average over the last one to eight. It should
          fall as the run goes on; if it does not, the body moves too fast: lower its learning rate. If it jumps, look
          at those batches.
        - `feature_drift`, how far the features of the last updates exceed those the curvature was built from: near 1
          they are alike, far above they are new to it, far below the curvature is of larger ones. Lower `forgetting`.
        - `dead_features`, those that never fired as far as the curvature remembers, and `silent_features`, those that
          did not in the last updates. They cost and give nothing: lower the body's learning rate, or make it narrower.

        Those of the last updates know one update in eight, eight samples of each and 32 in all, and are NaN before an
        update, and inside a captured step, which the host does not see.
        """
        desk = self._ready()
        T = self._root()
        p = T.shape[1]
        v = T.new_ones(p)
        for _ in range(16):  # the power method for B's largest eigenvalue
            v = T.T @ (T @ (v / torch.linalg.vector_norm(v)))
        smallest = 1 / float(torch.linalg.vector_norm(v))
        variance = T.square().sum(0)  # B's diagonal: 1/ridge where no data came, and less elsewhere
        recent = as_tensor(desk.recent[: desk.remembered])
        largest = drift = step = silent = math.nan
        if desk.remembered:
            mean_square = float(torch.linalg.matrix_norm(recent, 2)) ** 2 / desk.remembered
            largest = smallest + self._mass * mean_square
            known = self._mass / p if self._mass > p else 1.0
            drift = float((recent @ T.T).square().sum(1).mean()) * known
            step = float(torch.linalg.vector_norm(desk.weights - as_tensor(desk.before))) / (self._steps - desk.since)
            silent = float((recent == 0).all(0).sum())
        return {
            "condition": largest / smallest,
            "smallest_eigenvalue": smallest,
            "effective_samples": self._mass,
            "last_step": step,
            "feature_drift": drift,
            "dead_features": float((variance * self._ridge_left > 1 - 1e-9).sum()),
            "silent_features": silent,
        }


class Desk:
    """Work space between a head and the mathematics: the state as arrays, with views made once and kept."""

    def __init__(self, solver: RLS, linear: nn.Linear) -> None:
        self.linear = linear
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        k, p = linear.in_features, solver._Z.shape[1]
        self.k, self.device = k, weight.device.type
        # The views below keep this memory alive, so an equal address is the same tensor.
        self.home = (weight.data_ptr(), None if bias is None else bias.data_ptr())
        self.root, self.weights = solver._Z[:p], solver._Z[p:]
        digits = 1.0 if self.root.dtype == torch.float64 else 0.5  # float32 has half of them
        self.product_limit, self.growth_limit = _PRODUCT_LIMIT**digits, _GROWTH_LIMIT**digits
        state: list[Array] = [solver._Z, solver._H, solver._energy, solver._ridge_left, solver._prior, weight, bias]
        self.numpy = self.device == "cpu" and p <= _NUMPY_LIMIT and weight.dtype in (torch.float32, torch.float64)
        if self.numpy:
            state = [None if array is None else array.numpy() for array in state]
        self.Z, self.H, self.energy, self.ridge_left, self.prior, self.weight, self.bias = state
        self.T, self.W = self.Z[:p], self.Z[p:]
        self.W_weight, self.W_bias = self.W[:, :k], self.W[:, -1]
        # NumPy writes behind autograd's back; a write to no element of the weight tells it that the head changed.
        self.notice = linear.weight.detach()[:0]
        self.fused = fused_kernels(solver._Z, weight)
        self.tally = torch.zeros(3, dtype=torch.float64, device=weight.device)  # steps, mass, cursor inside a graph
        self.increments: dict[tuple[int, int], Tensor] = {}
        self.blocks: dict[int, tuple[Tensor, ...]] = {}  # room for the fused kernels, by the size of a block
        # For health alone: where one of the last updates started, and rows of some of them.
        before, recent = (
            torch.zeros_like(self.weights),
            torch.zeros(_RECENT, p, dtype=self.root.dtype, device=weight.device),
        )
        self.before: Array = before.numpy() if self.numpy else before
        self.recent: Array = recent.numpy() if self.numpy else recent
        self.turn, self.remembered, self.since = 0, 0, 0
        self.Phi: Array = self.Z[:0]
        self.Phi_features = self.Phi[:, :k]

    def increment(self, n: int, c: int) -> Tensor:
        """What a good update adds to steps, mass and cursor; made before a graph is captured, which may not make it."""
        if (n, c) not in self.increments:
            self.increments[n, c] = torch.tensor([1.0, n, c], dtype=torch.float64, device=self.root.device)
        return self.increments[n, c]

    def fits(self, linear: nn.Linear) -> bool:
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        assert weight is not None
        return (weight.data_ptr(), None if bias is None else bias.data_ptr()) == self.home

    def read(self) -> None:
        """W from the head. Where the head holds W rounded to its dtype, W keeps what the rounding lost."""
        weight, bias = self.weight, self.bias
        if self.numpy:
            self.W_weight += weight - self.W_weight.astype(weight.dtype)
            if bias is not None:
                self.W_bias += bias - self.W_bias.astype(bias.dtype)
        else:
            self.W_weight += weight - self.W_weight.to(weight.dtype)
            if bias is not None:
                self.W_bias += bias - self.W_bias.to(bias.dtype)

    def write(self) -> None:
        """The head takes W."""
        self.weight[...] = self.W_weight
        if self.bias is not None:
            self.bias[...] = self.W_bias
        self.notice.zero_()

    def rows(self, features: Tensor) -> Array:
        """Φ (n, p); valid until the next call."""
        x = features.detach()
        if x.ndim != 2:
            x = x.reshape(-1, self.k)
        n = x.shape[0]
        if self.Phi.shape[0] != n:
            Phi = torch.ones(n, self.Z.shape[1], dtype=self.root.dtype, device=x.device)
            self.Phi = Phi.numpy() if self.numpy else Phi
            self.Phi_features = self.Phi[:, : self.k]
        self.Phi_features[...] = as_numpy(x) if self.numpy else x
        return self.Phi

    def samples(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> tuple[Array, Array, float]:
        """Φ and Y, each row scaled by the root of its sample's weight, and the weights' sum."""
        Phi = self.rows(features)
        y = targets.detach()
        if y.ndim != 2:
            y = y.reshape(-1, self.W.shape[0])
        Y: Array = as_numpy(y) if self.numpy else y.to(self.root.dtype)
        if sample_weight is None:
            return Phi, Y, float(Phi.shape[0])
        omega = sample_weight.detach().reshape(-1, 1).to(self.root.dtype)
        root: Array = omega.sqrt().numpy() if self.numpy else omega.sqrt()
        return Phi * root, Y * root, float(omega.sum())

    def with_ridge(self, Phi: Array, Y: Array, turn: list[int], ridge: float, lam: float) -> tuple[Array, Array]:
        """Φ and Y with a row √r e_j for each coordinate whose turn it is: r the ridge it lacks, the prior its aim."""
        root = (ridge - lam * self.ridge_left[turn]).clip(0) ** 0.5
        targets = self.prior[:, turn].T * root[:, None]
        if self.numpy:
            rows: Array = np.zeros((len(turn), Phi.shape[1]), dtype=Phi.dtype)
            rows[np.arange(len(turn)), turn] = root
            return np.concatenate([Phi, rows]), np.concatenate([Y, targets])
        rows = torch.zeros(len(turn), Phi.shape[1], dtype=Phi.dtype, device=Phi.device)
        rows[torch.arange(len(turn)), turn] = root
        return torch.cat([Phi, rows]), torch.cat([Y, targets])

    def whiten(self, Phi: Array, Y: Array) -> tuple[Array, Array]:
        """F = TΦᵀ (p, n), the rows as T sees them, and the residuals E = Y - ΦWᵀ (n, m)."""
        P = self.Z @ Phi.T
        p = self.Z.shape[1]
        return P[:p], Y - P[p:].T

    def remember(self, Phi: Array, steps: int) -> None:
        """Note, for `RLS.health`, where the update starts and a few rows of it."""
        self.since = steps
        self.before[...] = self.W
        end = min(self.turn + min(len(Phi), _EVERY), _RECENT)
        self.recent[self.turn : end] = Phi[: end - self.turn]
        self.remembered = max(self.remembered, end)
        self.turn = end % _RECENT

    def arrays(self, *tensors: Tensor) -> list[Array]:
        """Tensors as arrays over the same memory."""
        return [tensor.numpy() for tensor in tensors] if self.numpy else list(tensors)

    def constant(self, values: Sequence[Any]) -> Array:
        """Numbers as an array."""
        return self.arrays(torch.tensor(values, dtype=self.root.dtype, device=self.root.device))[0]

    def square(self, x: Array) -> float:
        return float(np.vdot(x, x)) if self.numpy else float(torch.linalg.vector_norm(x)) ** 2


def restored(p: int, n: int, forgetting: float) -> int:
    """`RLS.restored_per_update` of p coordinates."""
    return 0 if forgetting == 1.0 else min(p, max(4 * n - 3, math.ceil(-p * math.log2(forgetting))))


def fused_kernels(Z: Tensor, weight: Tensor) -> ModuleType | None:
    """The kernels for one sample on a GPU, where there are any for this head."""
    if not Z.is_cuda or not weight.is_contiguous():
        return None
    try:
        from sepsa.heads import _fused
    except ModuleNotFoundError:  # a torch without Triton
        return None
    return _fused if Z.shape[0] <= _fused.MAX_ROWS else None


def as_numpy(x: Tensor) -> Array:
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def as_tensor(x: Array) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def rank_one(desk: Desk, f: Array, e: Array) -> None:
    """Equations 17 and 18 on the square root (Potter): f = Th (p,), e = y - Wh (m,).

    T <- (I - βffᵀ)T gives TᵀT = B - BhhᵀB/(1 + hᵀBh) for β = 1/(g + √g), g = 1 + fᵀf.
    """
    g = 1.0 + f @ f
    u = f @ desk.T  # Bh
    e_over_g = e / g
    desk.T += (f * (-1 / (g + g**0.5)))[:, None] * u  # (18)
    desk.W += e_over_g[:, None] * u  # (17): B_k h = Bh/g
    desk.energy += e * e_over_g


def few_rows(desk: Desk, F: Array, E: Array, large: bool = False) -> None:
    """The same for a block of r rows (Andrews): T <- (I - FXFᵀ)T with X = (C + I)⁻ᵀC⁻¹ and CCᵀ = I + FᵀF.

    Costs 6rp² operations in three products. `large` rows get C from a QR, which does not square them.
    """
    F, E = as_tensor(F), as_tensor(E)
    _p, r = F.shape
    one = torch.eye(r, dtype=F.dtype, device=F.device)
    if large:
        R = torch.linalg.qr(torch.cat([one, F]), mode="r").R
        C = (R * R.diagonal().sign()[:, None]).T.contiguous()
    else:
        C = torch.linalg.cholesky_ex(torch.addmm(one, F.T, F)).L
    V = torch.linalg.solve_triangular(C, E, upper=False)
    K = torch.linalg.solve_triangular(C + one, F.T, upper=False).neg_()
    K = torch.linalg.solve_triangular(C.T, torch.cat([K, V], 1), upper=True)
    as_tensor(desk.Z).addmm_(K.T, F.T @ desk.root)
    as_tensor(desk.energy).add_(V.square().sum(0))


def many_rows(desk: Desk, F: Array, E: Array) -> None:
    """The same for a block of about p rows or more, where only H grows: H += FFᵀ, 4rp² + p³/3 operations."""
    D = F @ E
    if desk.numpy:
        desk.H += F @ F.T
        V: Array = np.linalg.solve(desk.H, D)
        desk.W += V.T @ desk.T
        desk.energy += np.vecdot(E.T, E.T) - np.vecdot(D.T, V.T)
    else:
        V = torch.cholesky_solve(D, torch.linalg.cholesky_ex(desk.H.addmm_(F, F.T)).L)
        desk.W.addmm_(V.T, desk.T)
        desk.energy += (E * E).sum(0) - (D * V).sum(0)
