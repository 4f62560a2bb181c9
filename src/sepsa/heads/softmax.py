"""Softmax cross-entropy by an online Newton method with one p x p curvature for all classes.

Symbols: Φ (n, p) features, with a last column of ones where the head has a bias; τ (n, K) targets, probabilities times
the weights of sample and class, m = Σ_k τ_k; W (K, p) the head; P (n, K) its probabilities; R = mP - τ. The Hessian of
the summed cross-entropy is Σ_i m_i (diag P_i - P_i P_iᵀ) ⊗ φ_i φ_iᵀ. With V = P(1 - P), Gershgorin bounds each class
factor by 2 diag V_i, and the sum of Kronecker products is taken for one product of sums, as K-FAC does:

    diag s ⊗ A,    A = Σ_i ω_i φ_i φ_iᵀ + ridge/s̄ I,    ω_i = Σ_k U_ik,    s = 2 Σ_i U_i / Σ_i ω_i,    s̄ = 2/K       (1)

U = (mV + R²/m)/2 is the mean of the Fisher information and its sample: R² expects mV. V alone forgets where it matters:
a head that overshoots is sure of what is wrong, finds no curvature there, and overshoots again.

Both sums fade, because the V of old samples is that of an old head: A and Σ U keep λ = M/(M + 7n) of themselves in an
update of n samples, M = 8p + the samples seen, so they remember the last eighth; `forgetting` may lower λ. The classes
of one batch are not those of all, so its own part of (1) is inflated to cover each, by ρ = max_k s_k(batch)/s_k:

    W <- W - diag(1/s) Rᵀ Φ (λA + ρ Φᵀ diag(ω) Φ)⁻¹,    A <- λA + Φᵀ diag(ω) Φ                                    (2)

A single sample thus moves its logits by about R/ω and never by R/(ω s). Forgotten ridge comes back as rows √q e_j with
the residual √q (W - prior)_j, in rotation. State: T (p, p) with TᵀT = A⁻¹, and what (1) and (2) sum over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads._checks import (
    check_keys,
    check_rows,
    check_state_tensor,
    check_weight,
    explain_nonfinite,
    in_range,
    is_new_head,
    owned_head,
)

_FADE = 7.0  # curvature fades as if each sample pushed out so many; benchmarks/softmax_newton.py compares
_TOLERANCE = 1e-3  # of the sum of a sample's class probabilities: float16 and bfloat16 round them


class SoftmaxNewton:
    """Classifying head by an online Newton method on its cross-entropy; with one output, logistic regression.

    Choose it to train a classifier with its real loss, whenever a p x p matrix is affordable: the number of classes
    adds only the head itself. On a fixed body it approaches the minimizer of

        sum_i cross_entropy(W features_i, targets_i) + ridge/2 ||W - prior||^2

    where `prior` is what the head held when it was bound, over the last samples, a number that grows with all seen
    unless `forgetting` below 1 holds it down, by this factor in each update; the ridge is never forgotten.

    Targets are class probabilities (..., out_features) or integer labels (...). `label_smoothing` mixes them with the
    uniform distribution, `class_weight` multiplies each class's term, as in `torch.nn.functional.cross_entropy`, whose
    mean over samples `loss` is. One output stands for class 1 of two, so there are two class weights.
    """

    _TENSORS = ("_T", "_W", "_prior", "_shares", "_ridge_left", "_tally")
    _CHANGING = ("_T", "_W", "_shares", "_ridge_left", "_tally")  # by an update
    _NUMBERS = ("ridge", "forgetting", "label_smoothing")

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        label_smoothing: float = 0.0,
        class_weight: Sequence[float] | Tensor | None = None,
    ) -> None:
        self.ridge = in_range("ridge", ridge, 0.0, math.inf)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)
        self.label_smoothing = smoothing(label_smoothing)
        self.class_weight = None if class_weight is None else [float(c) for c in class_weight]
        for c in self.class_weight or ():
            in_range("class_weight", c, 0.0, math.inf)
        self.linear: nn.Linear | None = None

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> SoftmaxNewton:
        """Own the curvature of `linear`; its present weights become the prior mean."""
        if not is_new_head("SoftmaxNewton", self.linear, linear):
            return self
        K, p = linear.out_features, linear.in_features + (linear.bias is not None)
        classes = max(K, 2)
        if self.class_weight is not None and len(self.class_weight) != classes:
            raise ValueError(
                f"class_weight must have {classes} numbers, one a class of this head, got {len(self.class_weight)}"
            )
        self.linear = linear
        options: dict[str, Any] = {"device": linear.weight.device, "dtype": torch.float64}
        if linear.weight.device.type == "mps":
            options["dtype"] = torch.float32
        self._weights = torch.tensor(self.class_weight or [1.0] * classes, **options)
        self._T = torch.eye(p, **options) / math.sqrt(self._floor(K))
        self._W = torch.zeros(K, p, **options)
        self._W.copy_(self._head())
        self._prior = self._W.clone()
        self._shares = torch.ones(K, **options)  # Σ U of each class
        self._ridge_left = torch.full((p,), self._floor(K), **options)
        self._tally = torch.zeros(3, **options)  # updates, samples, the coordinate next to get its ridge back
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        self._ready()
        state: dict[str, Any] = {name.lstrip("_"): getattr(self, name).clone() for name in self._TENSORS}
        return state | {name: getattr(self, name) for name in (*self._NUMBERS, "class_weight")}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        self._ready()
        keys = {name.lstrip("_") for name in (*self._TENSORS, *self._NUMBERS, "class_weight")}
        check_keys("SoftmaxNewton", state_dict, keys)
        for name in self._TENSORS:
            key, shape = name.lstrip("_"), tuple(getattr(self, name).shape)
            check_state_tensor(key, state_dict[key], shape)
        options = {name: state_dict[name] for name in (*self._NUMBERS, "class_weight")}
        fresh = SoftmaxNewton(**options).bind(self._bound())  # refuses what the constructor would
        self.__dict__.update({name: getattr(fresh, name) for name in (*options, "_weights")})
        for name in self._TENSORS:
            getattr(self, name).copy_(state_dict[name.lstrip("_")])

    def to(self, device: torch.device | str | int) -> SoftmaxNewton:
        """Move the head and its curvature together."""
        self._bound().to(device)
        self._ready()
        return self

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        self._ready()
        return int(self._tally[0])

    @property
    def samples(self) -> float:
        """How many samples the head has seen, each by its weight."""
        self._ready()
        return float(self._tally[1])

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        more = f", label_smoothing={self.label_smoothing:g}" if self.label_smoothing else ""
        more += "" if self.class_weight is None else f", class_weight={self.class_weight}"
        return f"SoftmaxNewton(ridge={self.ridge:g}, forgetting={self.forgetting:g}{more}{head})"

    def _bound(self) -> nn.Linear:
        return owned_head("SoftmaxNewton", self.linear)

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is."""
        linear = self._bound()
        if self._T.device != linear.weight.device:
            for name in (*self._TENSORS, "_weights"):
                setattr(self, name, getattr(self, name).to(linear.weight.device))
        return linear

    @property
    def _desk(self) -> tuple[int, ...]:
        """Where a recorded update writes to."""
        linear = self._bound()
        return tuple(t.data_ptr() for t in (linear.weight, linear.bias, self._T) if t is not None)

    def _floor(self, K: int) -> float:
        """The ridge as A has it: ridge/s̄."""
        return self.ridge * max(K / 2, 1)

    def _head(self) -> Tensor:
        """W from the head. Where the head holds W rounded to its dtype, W keeps what the rounding lost."""
        linear = self._bound()
        parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
        held = torch.cat(parts, 1)
        return self._W + (held.to(self._W.dtype) - self._W.to(held.dtype).to(self._W.dtype))

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: the mean cross-entropy."""
        self._ready()
        logits, probabilities = both(outputs), self._probabilities(targets).to(outputs.dtype)
        C = logits.shape[-1]
        weight = None if self.class_weight is None else self._weights.to(outputs.dtype)
        return functional.cross_entropy(
            logits.reshape(-1, C), probabilities.reshape(-1, C), weight, label_smoothing=self.label_smoothing
        )

    @torch.no_grad()
    def predict_proba(self, features: Tensor) -> Tensor:
        """Class probabilities (..., classes), of two classes where the head has one output."""
        linear = self._ready()
        check_rows(linear, features)
        return both(linear(features)).softmax(-1)

    def _probabilities(self, targets: Tensor) -> Tensor:
        """Targets of any kind as probabilities (..., classes); a label that is none becomes NaN."""
        C = len(self._weights)
        if targets.is_floating_point():
            return torch.cat([1 - targets, targets], -1) if self._W.shape[0] == 1 else targets
        one = torch.arange(C, device=targets.device)
        hot = (targets.unsqueeze(-1) == one).to(self._T.dtype)
        return hot / hot.sum(-1, keepdim=True)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features) or labels (...).

        `sample_weight` (...) multiplies each sample's loss. `forgetting` acts once per update, however many samples
        it has. On bad input an error is raised and nothing changes.
        """
        linear = self._ready()
        labels = isinstance(targets, Tensor) and not targets.is_floating_point() and targets.dtype != torch.bool
        if labels and isinstance(features, Tensor) and targets.shape == features.shape[:-1]:
            check_rows(linear, features)
            check_weight(linear, features, sample_weight)
        else:
            check_rows(linear, features, targets, sample_weight)
        with torch.autocast(linear.weight.device.type, enabled=False):
            new, fine = self._learned(features, targets, sample_weight)
            if not bool(fine):
                raise self._explain(features, targets)
            self._take(new)

    def prepare_on_device(self) -> None:
        """Bring what `update_on_device` needs to the device."""
        self._ready()

    @torch.no_grad()
    def update_on_device(self, features: Tensor, targets: Tensor) -> Tensor:
        """`update` without a look from the host: samples that are not finite change nothing, and the flag says so."""
        if not targets.is_floating_point():
            targets = targets.reshape(features.shape[:-1])
        new, fine = self._learned(features, targets, None)
        self._take([value.where(fine, getattr(self, name)) for name, value in zip(self._CHANGING, new, strict=True)])
        return fine

    def _take(self, new: Sequence[Tensor]) -> None:
        for name, value in zip(self._CHANGING, new, strict=True):
            getattr(self, name).copy_(value)
        linear = self._bound()
        linear.weight.copy_(self._W[:, : linear.in_features])
        if linear.bias is not None:
            linear.bias.copy_(self._W[:, -1])

    def _explain(self, features: Tensor, targets: Tensor) -> ValueError:
        rows = self._probabilities(targets).reshape(-1, len(self._weights))
        bad = ((rows < 0).any(1) | ((rows.sum(1) - 1).abs() > _TOLERANCE)) & rows.isfinite().all(1)
        if not targets.is_floating_point():
            wrong = targets.reshape(-1)[rows.isnan().any(1)]
            if len(wrong):
                most = rows.shape[1] - 1
                return ValueError(
                    f"targets must be class labels in [0, {most}], got {int(wrong[0])}: nothing was learned"
                )
        elif bool(bad.any()):
            what = "in [0, 1]" if self._W.shape[0] == 1 else "class probabilities, at least 0 and of sum 1"
            return ValueError(
                f"targets must be {what}, got {targets.reshape(len(rows), -1)[bad][0].tolist()}: nothing was learned"
            )
        return explain_nonfinite(features, targets, self._bound())

    def _learned(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """What the state would be after an update, and whether it may be. Reads nothing back to the host."""
        linear, dtype = self._bound(), self._T.dtype
        (K, p), C = self._W.shape, len(self._weights)
        x = features.detach().reshape(-1, linear.in_features).to(dtype)
        n = len(x)
        Phi = x if linear.bias is None else torch.cat([x, x.new_ones(n, 1)], 1)
        t = self._probabilities(targets.detach()).reshape(n, C).to(dtype)
        valid = (t >= 0).all() & ((t.sum(1) - 1).abs() <= _TOLERANCE).all()
        t = ((1 - self.label_smoothing) * t + self.label_smoothing / C) * self._weights
        if sample_weight is not None:
            t = t * sample_weight.reshape(-1, 1).to(dtype)
        W = self._head()

        # (1), at the head as it is
        m = t.sum(1, keepdim=True)
        P = both(Phi @ W.T).softmax(1)
        R = (m * P - t)[:, C - K :]
        P = P[:, C - K :]
        tiny = torch.finfo(dtype).tiny
        U = (m * P * (1 - P) + R.square() / m.clamp(min=tiny)) / 2
        omega = U.sum(1, keepdim=True)
        updates, seen, cursor = self._tally
        mass = seen + (_FADE + 1) * p
        lam = (mass / (mass + _FADE * m.sum())).clamp(max=self.forgetting)
        shares = lam * self._shares + (1 - lam) + U.sum(0)
        s = min(K, 2) * shares / shares.sum()
        rho = ((U.sum(0) / s).max() * min(K, 2) / U.sum().clamp(min=tiny)).clamp(min=1)

        # The rows that A gains, scaled to weight one, and the residuals of (2) as they see them
        scale = omega.sqrt()
        c = min(p, max(n, math.ceil(-p * math.log2(self.forgetting))))
        turn = (cursor.long() + torch.arange(c, device=x.device)) % p
        left = lam * self._ridge_left
        back = (self._floor(K) - left[turn]).clamp(min=0).sqrt()[:, None]
        rows = torch.cat([Phi * scale, Phi.new_zeros(c, p).scatter_(1, turn[:, None], back)])
        residuals = torch.cat([R / s / scale.clamp(min=tiny), back * (W - self._prior)[:, turn].T])
        inflation = torch.cat([rho.expand(n), rho.new_ones(c)])[:, None]

        T = self._T / lam.sqrt()
        T, step = absorb(T, rows, residuals, inflation.sqrt())
        W = W - step
        tally = torch.stack([updates + 1, seen + m.sum(), (cursor + c) % p])
        fine = valid & Phi.square().sum().isfinite() & T.isfinite().all() & W.to(linear.weight.dtype).isfinite().all()
        return [T, W, shares, left.index_fill(0, turn, self._floor(K)), tally], fine


def absorb(T: Tensor, rows: Tensor, residuals: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Q (r, p) joins the A of TᵀT = A⁻¹: the new T, and the step ((A + QᵀD²Q)⁻¹QᵀE)ᵀ with D = diag d, d (r, 1).

    With F = TQᵀ: (I + FFᵀ)^(-1/2) T is such a root, and the step is Tᵀ(I + FD²Fᵀ)⁻¹FE = TᵀFD(I + DFᵀFD)⁻¹D⁻¹E.
    """
    F = T @ rows.T
    p, r = F.shape
    if r >= p:
        G = F * d.T
        return triangular(root(F @ F.T), T), solve(root(G @ G.T), F @ residuals).T @ T
    M, Q = F.T @ F, F.T @ T
    C = root(M)  # T - FXFᵀT is a root for X = C⁻ᵀ(C + I)⁻¹ (Andrews)
    X = triangular(C.T, triangular(C + torch.eye(r, dtype=T.dtype, device=T.device), F.T), upper=True)
    return T - X.T @ Q, (d * solve(root(d * M * d.T), residuals / d)).T @ Q


def root(M: Tensor) -> Tensor:
    """The Cholesky factor of I + M, where what rounding takes from a large M is given back."""
    M = M.clone()
    M.diagonal().add_(1 + 4 * torch.finfo(M.dtype).eps * M.diagonal().sum())
    C: Tensor = torch.linalg.cholesky_ex(M).L
    return C


def solve(C: Tensor, X: Tensor) -> Tensor:
    """(CCᵀ)⁻¹X."""
    return triangular(C.T, triangular(C, X), upper=True)


def triangular(C: Tensor, X: Tensor, upper: bool = False) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(C, X, upper=upper)
    return solution


def both(logits: Tensor) -> Tensor:
    """Logits of all classes: one output is the logit of class 1 against a 0 for class 0."""
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits


def smoothing(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"label_smoothing must be a number in [0, 1), got {value!r}")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1), got {value}")
    return float(value)
