"""Online L-BFGS: a quasi-Newton head in O(lp) time and memory, for heads too wide for a p x p matrix.

Symbols: Φ (n, p) the features of a batch, with a last column of ones where the head has a bias; T (n, m) its targets;
N the samples seen, less what was forgotten of them; l the memory. The objective of one batch is

    f(V) = mean_i loss(VΦ_i, T_i) + (ridge/N) ½‖V - prior‖²,      loss = ½‖VΦ_i - T_i‖² or the cross-entropy

With G = ∇f(V) (m, p), read as one long vector g, a step is

    V = (1 - β) Z + β W          where the gradient is taken, between the fast iterate Z and the head W
    d = Hg                       H the inverse curvature that the last l pairs (s, y) describe
    Z <- Z - η d
    W <- W + c (Z - W)           c = 3n/(N + 2n): the mean of all Z, each weighted by the square of its time

n < p samples can be fitted to the letter along the way, noise and all, so Z jitters however long it runs; the mean W is
what converges. β makes the jitter smaller than averaging alone does (Defazio et al., "The road less scheduled", 2024).

The step η is the smaller of two: what is safe on this batch, and the mean of that since H last changed. Along d the
objective has slope -gᵀd and curvature dᵀ∇²f d, which for the cross-entropy changes by at most the factor exp(Rη), R the
largest range over the classes of a row of Φdᵀ (Bach, "Self-concordant analysis for logistic regression", 2010). So
η = log(1 + R gᵀd / dᵀ∇²f d) / R stops short of the minimum along d; for the squared loss, R = 0, it is the minimum.

A pair is a direction s and y = ∇²f s, the difference of two gradients on the same samples, written out. One batch shows
∇²f s under noise about √(p/n) as large as itself, so s is held and y is the mean over the batches of a share 1/l of the
time so far; then s <- d/‖d‖ begins the next pair. In the end y <- y + δ‖y‖s, so that sᵀy >= δ‖s‖‖y‖ and H is positive
definite by construction. With S, Y (l, mp) the pairs, R the upper triangle of SYᵀ and D its diagonal, H is

    H = γI + [S; Y]ᵀ M [S; Y],   M = [R⁻ᵀ(D + γYYᵀ)R⁻¹, -γR⁻ᵀ; -γR⁻¹, 0],   γ = mean of sᵀy/yᵀy

(Byrd, Nocedal and Schnabel, "Representations of quasi-Newton matrices", 1994): two products of a vector with [S; Y].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads._checks import (
    at_least,
    check_keys,
    check_rows,
    check_state_tensor,
    explain_nonfinite,
    in_range,
    is_new_head,
    owned_head,
)

_LOSSES = ("squared", "cross-entropy")
_BETA = 0.8  # any value from 0.5 to 0.95 does as well
_DELTA = 0.1  # likewise from 1e-4 to 0.3


class OnlineLBFGS:
    """Linear head by online L-BFGS: squared loss or cross-entropy at O(memory · p) a step and output.

    Choose it where p² numbers are too many for `RLS`, which is exact after one pass where this takes several.
    Over many passes through the same data, in any order, in batches of one size, the head approaches the minimizer of

        sum_i loss(W features_i, targets_i) + (ridge / passes) ½ ||W - prior||^2

    as `RLS` does, where loss is ½ ||targets_i - W features_i||^2 or the cross-entropy, and `prior` is what the head
    held when it was bound. `forgetting` < 1 weights what was seen by forgetting^age, age counting updates, and leaves
    the ridge whole. With loss="cross-entropy" targets are probabilities: each row is at least 0 and sums to 1, or for
    a head of one output, the logistic case, lies in [0, 1].

    Features and targets may come in any floating dtype; the arithmetic runs in `dtype`, float32 unless given.
    """

    _TENSORS = ("_W", "_Z", "_prior", "_A", "_s", "_y", "_SY", "_YY")
    _SETTINGS = ("objective", "memory", "ridge", "forgetting")
    _COUNTS = ("_steps", "_pairs")
    _SUMS = ("_mass", "_pair_mass", "_slope", "_bend")

    def __init__(
        self,
        *,
        loss: str = "squared",
        memory: int = 10,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_settings(loss, memory, ridge, forgetting)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.objective, self.memory, self.dtype = loss, memory, dtype
        self.ridge, self.forgetting = float(ridge), float(forgetting)
        self.linear: nn.Linear | None = None

    # ------------------------------------------------------------------ state

    @torch.no_grad()
    def bind(self, linear: nn.Linear) -> OnlineLBFGS:
        """Own the curvature pairs of `linear`; its present weights become the prior mean."""
        if not is_new_head("OnlineLBFGS", self.linear, linear):
            return self
        self.linear = linear
        W = joined(linear).to(self.dtype)
        self._W, self._Z, self._prior = W, W.clone(), W.clone()
        self._s, self._y = torch.zeros_like(W), torch.zeros_like(W)  # the pair in the making, and the sum for its y
        self._A = W.new_zeros(2, self.memory, W.numel())  # [S; Y], the newest pair last
        self._SY, self._YY = torch.zeros(2, self.memory, self.memory, dtype=torch.float64)
        self._steps, self._pairs = 0, 0
        self._mass, self._pair_mass = 0.0, 0.0  # the samples seen, and those that the pair in the making saw
        self._slope, self._bend = 0.0, 0.0  # sums of gᵀd and gᵀd/η since H last changed
        self._compact()
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        self._ready()
        state: dict[str, Any] = {name.lstrip("_"): getattr(self, name).clone() for name in self._TENSORS}
        return state | {n.lstrip("_"): getattr(self, n) for n in self._SETTINGS + self._COUNTS + self._SUMS}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        linear = self._ready()
        keys = {name.lstrip("_") for name in self._TENSORS + self._SETTINGS + self._COUNTS + self._SUMS}
        check_keys("OnlineLBFGS", state_dict, keys)
        check_settings(*(state_dict[name] for name in self._SETTINGS))
        memory, size = state_dict["memory"], self._W.numel()
        shapes = {"_A": (2, memory, size), "_SY": (memory, memory), "_YY": (memory, memory)}
        for name in self._TENSORS:
            key, shape = name.lstrip("_"), shapes.get(name, tuple(self._W.shape))
            check_state_tensor(key, state_dict[key], shape)
        for name in self._COUNTS:
            at_least(f"state_dict[{name.lstrip('_')!r}]", state_dict[name.lstrip("_")], 0)
        if state_dict["pairs"] > memory:
            raise ValueError(f"state_dict['pairs'] must be at most the memory, {memory}, got {state_dict['pairs']}")
        for name in self._SUMS:
            value = state_dict[name.lstrip("_")]
            if not isinstance(value, float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"state_dict[{name.lstrip('_')!r}] must be a number of at least 0, got {value!r}: "
                    "the checkpoint is damaged"
                )
        for name in self._SETTINGS + self._COUNTS + self._SUMS:
            setattr(self, name, state_dict[name.lstrip("_")])
        for name in self._TENSORS:
            small = name in ("_SY", "_YY")
            device, dtype = ("cpu", torch.float64) if small else (linear.weight.device, self.dtype)
            setattr(self, name, state_dict[name.lstrip("_")].detach().to(device=device, dtype=dtype, copy=True))
        self._compact()

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        return self._steps

    @property
    def samples(self) -> float:
        """How many samples the head remembers: all it saw at forgetting 1, weighted by forgetting^age below."""
        return self._mass

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        return (
            f"OnlineLBFGS(loss={self.objective!r}, memory={self.memory}, ridge={self.ridge:g}, "
            f"forgetting={self.forgetting:g}{head})"
        )

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is."""
        linear = owned_head("OnlineLBFGS", self.linear)
        if linear.weight.device != self._W.device:
            for name in ("_W", "_Z", "_prior", "_A", "_s", "_y", "_M"):
                setattr(self, name, getattr(self, name).to(linear.weight.device))
        return linear

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: mean squared error or mean cross-entropy."""
        if self.objective == "squared":
            return functional.mse_loss(outputs, targets)
        if outputs.shape[-1] == 1:
            return functional.binary_cross_entropy_with_logits(outputs, targets)
        return functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1, targets.shape[-1]))

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features).

        `sample_weight` (...) multiplies each sample's loss. `forgetting` acts once per update, however many samples
        it has. On bad input an error is raised and nothing changes.
        """
        linear = self._ready()
        check_rows(linear, features, targets, sample_weight)
        if self.objective == "cross-entropy":
            check_probabilities(targets)
        with torch.autocast(linear.weight.device.type, enabled=False):
            self._learn(linear, features, targets, sample_weight)

    def _learn(self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> None:
        m, k = linear.weight.shape
        Phi, T = features.reshape(-1, k).to(self.dtype), targets.reshape(-1, m).to(self.dtype)
        n = float(len(Phi))
        if linear.bias is not None:
            Phi = torch.cat([Phi, Phi.new_ones(len(Phi), 1)], 1)
        if sample_weight is None:
            omega = Phi.new_full((len(Phi), 1), 1 / n)
        else:
            omega = sample_weight.reshape(-1, 1).to(self.dtype)
            n = float(omega.sum())
            omega = omega / (n or 1.0)
        N = self.forgetting * self._mass + n
        lam = self.ridge / N if N else 0.0

        here = joined(linear)
        moved = (here - self._W.to(here.dtype)).to(self.dtype)  # zero, unless somebody set the head
        W, Z = self._W + moved, self._Z + moved
        V = torch.lerp(Z, W, _BETA)
        both = Phi @ torch.cat([V, self._s]).T
        outputs, along_s = both[:, :m], both[:, m:]
        if self.objective == "squared":
            P, E = None, outputs - T
        else:
            P = outputs.sigmoid() if m == 1 else outputs.softmax(1)
            E = P - T
        both = (torch.cat([E, curve(P, along_s)], 1) * omega).T @ Phi
        G, y = both[:m] + lam * (V - self._prior), both[m:] + lam * self._s
        D, length, slope = self._direction(G)
        along = Phi @ D.T
        bend = max(0.0, float((along * curve(P, along) * omega).sum())) + lam * float(D.square().sum())
        if not math.isfinite(length + slope + bend + float(torch.linalg.vector_norm(y))):
            raise explain_nonfinite(features, targets, linear)
        total, bent, eta = self._slope, self._bend, 0.0
        if slope > 0 and bend > 0:
            eta = slope / bend
            R = 0.0 if P is None else float(along.abs().max() if m == 1 else (along.amax(1) - along.amin(1)).max())
            if R * eta > 1e-6:  # below, the logarithm is its argument
                eta = math.log1p(R * eta) / R
            total, bent = total + slope * length, bent + slope * length**2 / eta
            eta = min(eta, length * total / bent)
        Z = Z - eta * D
        if n:
            W = W + (3 * n / (N + 2 * n)) * (Z - W)
        head = W.to(here.dtype)
        if not (math.isfinite(bent) and bool(torch.isfinite(head).all())):
            raise explain_nonfinite(features, targets, linear)

        # From here on nothing can fail, so the state changes.
        self._W, self._Z, self._slope, self._bend = W, Z, total, bent
        self._steps += 1
        self._mass = N
        self._y += n * y
        self._pair_mass += n
        if self._pair_mass * self.memory >= N:
            self._remember()
            self._s, self._y, self._pair_mass = D, torch.zeros_like(y), 0.0
        linear.weight.copy_(head[:, :k])
        if linear.bias is not None:
            linear.bias.copy_(head[:, k])

    def _direction(self, G: Tensor) -> tuple[Tensor, float, float]:
        """d/‖d‖ (m, p) for d = Hg, ‖d‖ and gᵀd/‖d‖; where rounding made Hg no descent, the same for d = g."""
        g, A = G.reshape(-1), self._A.reshape(2 * self.memory, -1)
        d = self._gamma * g + (self._M @ (A @ g)) @ A
        length = float(torch.linalg.vector_norm(d))
        d = d / (length or 1.0)
        slope = float(g @ d)
        if not slope > 0:
            length = slope = float(torch.linalg.vector_norm(g))
            d = g / (length or 1.0)
        return d.reshape(G.shape), length, slope

    def _remember(self) -> None:
        """The pair in the making becomes the newest of the memory."""
        s = self._s.reshape(-1)
        y = self._y.reshape(-1) / self._pair_mass
        y = y + _DELTA * torch.linalg.vector_norm(y) * s
        # s is zero until the first step, and y may have become too large to square.
        if not (float(s @ y) > 0 and math.isfinite(float(y @ y))):
            return
        self._A[:, :-1] = self._A[:, 1:].clone()
        self._A[0, -1], self._A[1, -1] = s, y
        for products, column in zip((self._SY, self._YY), (self._A @ y).double().cpu(), strict=True):
            products[:-1, :-1] = products[1:, 1:].clone()
            products[:, -1] = column
        self._YY[-1] = self._YY[:, -1]
        self._pairs = min(self._pairs + 1, self.memory)
        self._slope, self._bend = 0.0, 0.0
        self._compact()

    def _compact(self) -> None:
        """γ and M (2l, 2l), with zeros where a young memory has no pairs yet."""
        held = slice(self.memory - self._pairs, self.memory)
        M = torch.zeros(2, self.memory, 2, self.memory, dtype=torch.float64)
        self._gamma = 1.0
        if self._pairs:
            R, YY = self._SY[held, held].triu(), self._YY[held, held]
            D = R.diagonal()
            self._gamma = float((D / YY.diagonal()).mean())
            inverse = torch.linalg.solve_triangular(R, torch.eye(self._pairs, dtype=R.dtype), upper=True)
            M[0, held, 0, held] = inverse.T @ (D.diag() + self._gamma * YY) @ inverse
            M[0, held, 1, held] = -self._gamma * inverse.T
            M[1, held, 0, held] = -self._gamma * inverse
        self._M = M.reshape(2 * self.memory, -1).to(self._A)


def joined(linear: nn.Linear) -> Tensor:
    """The head's weight, with its bias as a last column if it has one: (m, p), a copy."""
    weight = linear.weight.detach()
    return weight.clone() if linear.bias is None else torch.cat([weight, linear.bias.detach()[:, None]], 1)


def curve(P: Tensor | None, U: Tensor) -> Tensor:
    """The loss's second derivative at the outputs, times U (n, m): I without P, else that of the (one or m) logits."""
    if P is None:
        return U
    if U.shape[1] == 1:
        return P * (1 - P) * U
    return P * (U - (P * U).sum(1, keepdim=True))


def check_settings(loss: str, memory: int, ridge: float, forgetting: float) -> None:
    """The hyperparameters, given or loaded."""
    if loss not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}, got {loss!r}")
    at_least("memory", memory, 1)
    in_range("ridge", ridge, 0.0, math.inf)
    in_range("forgetting", forgetting, 0.0, 1.0)


def check_probabilities(targets: Tensor) -> None:
    """What the cross-entropy can be taken with; NaN is left to the check of the numbers."""
    low, high = float(targets.min()), float(targets.max())
    if low < 0 or (targets.shape[-1] == 1 and high > 1):
        raise ValueError(
            f"targets must be probabilities for loss 'cross-entropy', got {low if low < 0 else high:g}: "
            "one-hot rows, or rows that are at least 0 and sum to 1"
        )
    if targets.shape[-1] > 1:
        worst = float((targets.sum(-1, dtype=torch.float64) - 1).abs().max())
        if worst > 1e-2:  # what rounding leaves of soft labels in half precision
            raise ValueError(f"targets must sum to 1 in each row for loss 'cross-entropy', got a row {worst:g} off")
