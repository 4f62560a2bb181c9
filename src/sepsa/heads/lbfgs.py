"""The quasi-Newton head: state and interface of the online L-BFGS method in `math.quasi_newton`."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.base import parameters
from sepsa.heads.base.checks import (
    bias_setting,
    check_classes,
    check_dtype,
    check_outputs,
    check_rows,
    explain_nonfinite,
)
from sepsa.heads.base.head import OwnsHead, assign, head_of, shape_words
from sepsa.heads.base.state_checks import read_solver, settings_of
from sepsa.heads.cross_entropy.math import mean_loss, wrong_targets
from sepsa.heads.least_squares.math import MEAN, copies, mse_loss
from sepsa.heads.quasi_newton import KEYS, LBFGSState, compact, curve, direction, remember, step_size
from sepsa.validation import at_least, in_range, one_of

HALF_PRECISION = 1e-2  # off a sum of 1: what rounding leaves of soft labels in half precision
_BETA = 0.8  # any value from 0.5 to 0.95 does as well


class OnlineLBFGS(OwnsHead):
    """Train a linear head by online L-BFGS on squared loss or cross-entropy, at O(memory · p) per step and output.

    Choose it where a p x p matrix is too large for `RLS` or `SoftmaxNewton`. `RLS` is exact after one pass over the
    data; this method needs several. Over many passes, in any order, in batches of one size, the weights approach the
    minimizer of

        sum_i loss(W features_i, targets_i) + (ridge / passes) ½ ||W - prior||^2

    where loss is ½ ||targets_i - W features_i||^2 or the cross-entropy, and `prior` is the head's weights at `bind`.

    Args:
        loss: "squared" or "cross-entropy".
        memory: Number of curvature pairs, each of the size of the head; more help ill-conditioned features.
        ridge: Strength of the pull towards the initial weights; 1 has the weight of one sample of unit features.
        forgetting: Factor in (0, 1] on the weight of earlier samples, once per update; the ridge is not forgotten.
        bias_ridge: Ridge of the bias. None: 1e-4 (1e-3 in float32) or `ridge`, whichever is smaller; "ridge": `ridge`.
        dtype: Dtype of the arithmetic. Features and targets may have any floating dtype.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `RLS` and `SoftmaxNewton`, which converge in fewer samples where p x p fits in memory.

    Examples:
        >>> import torch
        >>> from sepsa import OnlineLBFGS
        >>> _ = torch.manual_seed(0)
        >>> features = torch.randn(100, 2)
        >>> targets = features @ torch.tensor([[2.0], [-1.0]])
        >>> head = OnlineLBFGS().bind(torch.nn.Linear(2, 1))
        >>> for step in range(50):
        ...     head.update(features, targets)
        >>> bool(head.loss(head.predict(features), targets) < 1e-3)
        True
    """

    forgets = True  # in the next update; see `sepsa.heads.Forgets`
    settings = ("loss_name", "memory", "ridge", "forgetting", "bias_ridge")
    _replaced = ("_state",)

    def __init__(
        self,
        *,
        loss: str = "squared",
        memory: int = 10,
        ridge: float = 1.0,
        forgetting: float = 1.0,
        bias_ridge: float | Literal["ridge"] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        one_of("loss", loss, ("squared", "cross-entropy"))
        at_least("memory", memory, 1)
        check_dtype(dtype)
        self.loss_name, self.memory, self.dtype = loss, memory, dtype
        self.ridge, self.bias_ridge = in_range("ridge", ridge, 0.0, math.inf), bias_setting(bias_ridge)
        self.forgetting = in_range("forgetting", forgetting, 0.0, 1.0)

    # ------------------------------------------------------------------ state

    def _start(self, linear: nn.Linear) -> None:
        W = parameters.start(linear, self.dtype)
        zero = torch.zeros_like(W)
        A = W.new_zeros(2, self.memory, W.numel())
        products = torch.zeros(self.memory, self.memory, dtype=torch.float64)
        self._state = compact(LBFGSState(W, W.clone(), W.clone(), zero, zero, A, products, products))

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, without the head's weights, which are in the `nn.Linear`."""
        self._ready()
        return dict(zip(KEYS, copies(self._state[: len(KEYS)]), strict=True)) | settings_of(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """

        def make(loss_name: str, **others: Any) -> OnlineLBFGS:
            return OnlineLBFGS(loss=loss_name, dtype=self.dtype, **others)

        self._ready()
        saved, fresh = read_solver(self, state_dict, {*KEYS}, make)
        state, memory = self._state, fresh.memory
        shapes = {"A": (2, memory, state.W.numel()), "SY": (memory, memory), "YY": (memory, memory)}
        entries: dict[str, Any] = {}
        for key in KEYS:
            own = getattr(state, key)
            if isinstance(own, Tensor):
                entries[key] = saved.tensor(key, shapes.get(key, tuple(own.shape)), own.dtype, own.device)
            else:
                entries[key] = saved.integer(key) if isinstance(own, int) else saved.number(key, 0)
        assign(self, **vars(fresh), _state=compact(state._replace(**entries)))

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        self._ready()
        return self._state.steps

    @property
    def samples(self) -> float:
        """The number of samples that the head remembers: the sum of their weights times forgetting^age."""
        self._ready()
        return self._state.samples

    @property
    def pairs(self) -> int:
        """The number of curvature pairs in memory."""
        self._ready()
        return self._state.pairs

    def __repr__(self) -> str:
        return (
            f"OnlineLBFGS(loss={self.loss_name!r}, memory={self.memory}, ridge={self.ridge:g}, "
            f"forgetting={self.forgetting:g}{parameters.bias_words(self.bias_ridge)}{shape_words(self.linear)})"
        )

    def _ready(self) -> nn.Linear:
        """The head, with the state where it is."""
        linear = head_of(self)
        device, state = linear.weight.device, self._state
        if device != state.W.device:
            large = [tensor.to(device) for tensor in state[:6]]
            assign(self, _state=compact(LBFGSState._make([*large, *state[6:]])))
        return linear

    # ------------------------------------------------------------------ learning

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error or mean cross-entropy, the loss that the head minimizes, for the body to
        follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: As for `update`.

        Returns:
            A scalar.
        """
        squared = self.loss_name == "squared"
        check_outputs(outputs, targets, not (squared or targets.is_floating_point()))
        loss: Tensor = mse_loss(outputs, targets, MEAN) if squared else mean_loss(outputs, targets)
        return loss

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features). For "cross-entropy": probabilities, of sum 1 or, for one output, in
                [0, 1]; or integer labels (...).
            sample_weight: Factor (...) on each sample's loss. `forgetting` acts once per update, whatever its size.

        Raises:
            ValueError: A shape or target is wrong, or a value is not finite; nothing was learned.
        """
        linear = self._ready()
        if self.loss_name == "cross-entropy":
            check_classes(linear, features, targets, sample_weight)
            like = linear.weight.new_empty(max(linear.out_features, 2), dtype=self.dtype)
            if wrong := wrong_targets(targets, like, HALF_PRECISION):
                raise wrong
            if not targets.is_floating_point():
                targets = functional.one_hot(targets.long(), len(like))[..., -linear.out_features :]
        else:
            check_rows(linear, features, targets, sample_weight)
        with torch.autocast(linear.weight.device.type, enabled=False):
            self._learn(linear, features, targets, sample_weight)

    def _learn(self, linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> None:
        state = self._state
        m = linear.out_features
        Phi, T = parameters.rows(linear, features, self.dtype), targets.detach().reshape(-1, m).to(self.dtype)
        omega = T.new_ones(len(T)) if sample_weight is None else sample_weight.detach().to(self.dtype)
        n = float(omega.sum())
        omega = omega.reshape(-1, 1) / (n or 1.0)
        N = (self.forgetting if self.forgets else 1.0) * state.samples + n
        lam = parameters.ridges(linear, self.ridge, self.bias_ridge, state.W) / (N or math.inf)

        W = parameters.follow(linear, state.W)
        Z = state.Z + (W - state.W)  # zero, unless somebody set the head
        V = torch.lerp(Z, W, _BETA)
        outputs, along_s = (Phi @ torch.cat([V, state.s]).T).chunk(2, 1)
        if self.loss_name == "squared":
            P, E = None, outputs - T
        else:
            P = outputs.sigmoid() if m == 1 else outputs.softmax(1)
            E = P - T
        both = (torch.cat([E, curve(P, along_s)], 1) * omega).T @ Phi
        G, y = both[:m] + lam * (V - state.prior), both[m:] + lam * state.s
        D, length, slope = direction(state, G)
        along = Phi @ D.T
        bend = max(0.0, float((along * curve(P, along) * omega).sum())) + float((lam * D.square()).sum())
        y = state.y + n * y
        if not math.isfinite(N + length + slope + bend + float(torch.linalg.vector_norm(y))):
            raise explain_nonfinite(features, targets, linear)
        R = 0.0 if P is None else float(along.abs().max() if m == 1 else (along.amax(1) - along.amin(1)).max())
        eta, total, bent = step_size(state, length, slope, bend, R)
        Z = Z - eta * D
        if n:
            W = W + (3 * n / (N + 2 * n)) * (Z - W)
        head = W.to(linear.weight.dtype)
        if not (math.isfinite(total + bent) and bool(torch.isfinite(head).all())):
            raise explain_nonfinite(features, targets, linear, W)

        new = state._replace(
            W=W,
            Z=Z,
            y=y,
            steps=state.steps + 1,
            samples=N,
            pair_samples=state.pair_samples + n,
            slope_sum=total,
            curvature_sum=bent,
        )
        if new.pair_samples * self.memory >= N:
            new = remember(new)._replace(s=D, y=torch.zeros_like(y), pair_samples=0.0)
        assign(self, head, _state=new)

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """Return the head's outputs. A standard deviation is not available: the pairs describe too little of the
        curvature.

        Args:
            features: Inputs of the head (..., in_features).

        Returns:
            Outputs (..., out_features), computed in the solver's dtype.
        """
        linear = self._ready()
        Phi, W = parameters.rows_to_predict(linear, features, self._state.W)
        return parameters.as_outputs(linear, features, Phi @ W.T)
