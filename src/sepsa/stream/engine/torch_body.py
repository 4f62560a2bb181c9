"""The engine with any torch body, by `sepsa.SepSA`.

With g the weight of each output, the head learns a batch by recursive least squares, and then the body follows the
gradient of mean ω g (Wφ - y)² at the new head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sepsa.heads import RLS
from sepsa.interrupt import whole_change
from sepsa.optimizer import SepSA
from sepsa.states import schema
from sepsa.states.tree import not_finite
from sepsa.stream.engine.options import head_and_optimizer
from sepsa.stream.engine.protocol import FitPlan, Floats, StreamEngine, residual_degrees
from sepsa.stream.kernels.robust import ROUNDING
from sepsa.validation import NotFinite, at_least

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "auto": (torch.optim.Adam, {"betas": (0.0, 0.999)}),
}


class TorchEngine(StreamEngine):
    """An engine whose body is a copy of `module`, an `nn.Module` from (n, inputs) to (n, k).

    Choose it where a multilayer perceptron is not enough; a step takes a hundred times as long as in the compiled
    engine. It has one head and the squared loss, without bounds on outliers.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        module: nn.Module,
        *,
        optimizer: str,
        lr: float,
        weight_decay: float,
        ridge: float,
        forgetting: float,
        batch: int,
        seed: int,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        body = deepcopy(module)
        like = next(body.parameters(), torch.empty(0))
        with torch.no_grad():
            features = body.eval()(like.new_zeros(2, inputs))
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
            came = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ValueError(f"module must map ({2}, {inputs}) to (2, k) features, got {came}")
        head = zero_head(features.shape[1], outputs, like)
        base, options = BASES[optimizer]
        self.solver = RLS(ridge=ridge, forgetting=forgetting, bias_ridge="ridge")
        options = options | {"lr": lr, "weight_decay": weight_decay}
        self.optimizer = SepSA(nn.Sequential(body, head), base, head="1", solver=self.solver, **options)
        self.inputs, self.outputs, self.batch_size = inputs, outputs, batch
        self._mean, self._scale, self._output_weights = np.zeros(inputs), np.zeros(inputs), np.zeros(outputs)
        self._rng_state = torch.Generator().manual_seed(seed).get_state()  # for random parts of the body, as dropout

    @classmethod
    def options(cls, parameters: Mapping[str, Any], for_fit: bool) -> dict[str, Any]:
        batch = parameters["batch_size"]
        return head_and_optimizer(parameters, 1e-4 if for_fit else 1e-3, one_head=True) | {
            "module": parameters["module"],
            "batch": 32 if batch == "auto" else at_least("batch_size", batch, 1),
        }

    @classmethod
    def fit_plan(cls, parameters: Mapping[str, Any], inputs: int) -> FitPlan:
        return FitPlan(fixed_features=False, speed=0.01)

    @classmethod
    def for_raw_rows(cls, inputs: int, outputs: int, *, classes: bool, seed: int, **options: Any) -> TorchEngine:
        return cls(inputs, outputs, seed=seed, **options)

    def copy(self) -> TorchEngine:
        return deepcopy(self)

    @property
    def samples(self) -> float:
        return self.solver.samples

    @property
    def chosen(self) -> dict[str, Any]:
        head = {"features": "hidden", "ridge": self.solver.ridge, "forgetting": self.solver.forgetting}
        return head | {"since": 0, "weights": [1.0]}

    def set_scaling(self, mean: Floats, scale: Floats, typical: Floats | float = 0.0, first: int = 0) -> None:
        self._mean[first:], self._scale[first:] = mean, scale

    def set_output_weights(self, weights: Floats | float) -> None:
        self._output_weights[:] = weights

    def schedule(self) -> tuple[float, float, int]:
        return float(self.optimizer.base.param_groups[0]["lr"]), float(self.solver.forgetting), self.batch_size

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        for group in self.optimizer.base.param_groups:
            group["lr"] = lr
        self.solver.forgetting, self.batch_size = forgetting, batch

    def noise_variance(self) -> Floats:
        penalty, degrees = self._penalty_and_residual_degrees()
        energy: Floats = self.solver.state_dict()["energy"].numpy(force=True)
        return np.maximum(energy - penalty, 0.0) / degrees

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        state = self.solver.state_dict()
        passes = max(1.0, float(self.solver.samples / samples))
        state["T"] *= math.sqrt(passes)  # B = TᵀT
        for name in ("left", "samples"):
            state[name] = state[name] / passes
        ridge, of_bias = state["ridges"]
        state["ridges"] = [ridge / passes, of_bias]  # "ridge": that of the weights
        if state["forgetting"] == 1.0 and bool((state["left"] < ridge / passes).any()):
            state["forgetting"] = 1 - 1e-9  # so that the ridge, of which a schedule has forgotten a part, is restored
        self.solver.load_state_dict(state)
        penalty, degrees = self._penalty_and_residual_degrees()
        state["energy"].copy_(torch.from_numpy(noise * degrees + penalty))
        self.solver.load_state_dict(state)

    def _penalty_and_residual_degrees(self) -> tuple[Floats, float]:
        head = self.optimizer.head
        state = self.solver.state_dict()
        ridge = state["left"].numpy(force=True)
        W = torch.cat([head.weight.detach(), head.bias.detach()[:, None]], 1).to(state["prior"])
        penalty: Floats = (W - state["prior"]).square().numpy(force=True) @ ridge
        free = len(ridge) - float(self.solver.covariance().diagonal().numpy(force=True) @ ridge)
        return residual_degrees(penalty, self.solver.samples, free)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "mean": self._mean.copy(),
            "scale": self._scale.copy(),
            "output_weights": self._output_weights.copy(),
            "generator": self._rng_state.numpy().copy(),
            "model": pack(self.optimizer.model.state_dict()),
            "optimizer": pack(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        new = schema.read(entry, state_dict, set(self.state_dict()))
        new.equal("inputs", self.inputs)
        outputs = new.integer("outputs", 1)
        with whole_change(self) as other:
            if outputs != self.outputs:
                other.resize(self.inputs, outputs)
            other._mean = new.array("mean", (self.inputs,))
            other._scale = new.array("scale", (self.inputs,), low=0.0)
            other._output_weights = new.array("output_weights", (outputs,), low=0.0)
            other._rng_state = torch.from_numpy(new.array("generator", tuple(self._rng_state.shape), np.uint8))
            load(new.path("model"), other.optimizer.model, new["model"])
            load(new.path("optimizer"), other.optimizer, new["optimizer"])

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, sample_weight: Floats) -> Floats:
        with whole_change(self) as other:
            out: Floats = other._learn(X, Y, sample_weight)
        return out

    def _learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        out = np.empty_like(Y)
        batch = self.batch_size
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(self._rng_state)
            for at in range(0, len(X), batch):
                some = slice(at, at + batch)
                out[some] = self._step(X[some], Y[some], weight[some])
            self._rng_state = torch.get_rng_state()
        return out

    def _step(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        before = self.predict(X)
        if not np.isfinite(before).all():
            raise NotFinite(
                "the module's output is not finite: nothing was learned; lower the learning rate, or rescale inputs, "
                "targets and weights"
            )
        seen = weight > 0
        if not seen.any():
            return before
        self._scale_constant_inputs(X[seen], Y[seen])
        body: nn.Module = self.optimizer.model.train()[0]  # type: ignore[index]
        features, y, w = body(self._tensor(X, scaled=True)), self._tensor(Y), self._tensor(weight)
        with self.optimizer.observe(y, w):
            outputs = self.optimizer.head(features)
        if features.requires_grad:
            loss = (w[:, None] * self._tensor(self._output_weights) * (outputs - y) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return before

    def _scale_constant_inputs(self, X: Floats, Y: Floats) -> None:
        """Give a scale to an input or target that was constant so far (`kernels.robust.scale_constant_inputs`)."""
        mean, scale, gain = self._mean, self._scale, self._output_weights
        for j in np.flatnonzero(scale == 0):
            off = np.abs(X[:, j] - mean[j])
            off = off[off > ROUNDING * np.abs(X[:, j])]
            scale[j] = 1 / off[0] if off.size else 0.0
        for k in np.flatnonzero(gain == 0):
            off = Y[Y[:, k] != 0, k]
            gain[k] = 1 / off[0] ** 2 if off.size else 0.0

    def _tensor(self, values: Floats, scaled: bool = False) -> Tensor:
        values = np.nan_to_num((values - self._mean) * self._scale, nan=0.0, posinf=np.inf) if scaled else values
        return torch.as_tensor(values).to(self.optimizer.head.weight)

    @torch.no_grad()
    def _features_and_outputs(self, X: Floats) -> tuple[Tensor, Floats]:
        features: Tensor = self.optimizer.model.eval()[0](self._tensor(X, scaled=True))  # type: ignore[index]
        return features, self.optimizer.head(features).double().numpy(force=True)

    def predict(self, X: Floats) -> Floats:
        return self._features_and_outputs(X)[1]

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        features, outputs = self._features_and_outputs(X)
        phi, B = torch.cat([features, features.new_ones(len(features), 1)], 1), self.solver.covariance()
        return outputs, torch.einsum("np,pq,nq->n", phi.to(B), B, phi.to(B)).numpy(force=True)

    def resize(self, inputs: int, outputs: int) -> None:
        """Add outputs as if they had been there, at zero, from the start; the module decides the inputs."""
        old, more = self.optimizer.head, outputs - self.outputs
        head = zero_head(old.in_features, outputs, old.weight)
        head.weight.data[: self.outputs], head.bias.data[: self.outputs] = old.weight.data, old.bias.data
        state = self.solver.state_dict()
        for name in ("W", "energy", "prior"):
            state[name] = torch.cat([state[name], state[name].new_zeros(more, *state[name].shape[1:])])
        self.solver = RLS(ridge=self.solver.ridge, forgetting=self.solver.forgetting, bias_ridge="ridge")
        model = nn.Sequential(self.optimizer.model[0], head)  # type: ignore[index]
        self.optimizer = SepSA(model, self.optimizer.base, head="1", solver=self.solver)
        self.solver.load_state_dict(state)
        self.outputs = outputs
        self._output_weights = np.concatenate([self._output_weights, np.zeros(more)])


def zero_head(features: int, outputs: int, like: Tensor) -> nn.Linear:
    """A head at zero, of the device and dtype of `like`; torch's random numbers are not used."""
    head: nn.Linear = skip_init(nn.Linear, features, outputs, device=like.device, dtype=like.dtype)  # type: ignore
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def pack(value: Any) -> Any:
    """Tensors, tuples and dicts with any keys as plain data."""
    if isinstance(value, Tensor):
        return {"tensor": value.detach().cpu().numpy().copy()}
    if isinstance(value, dict):
        return {"items": [[key, pack(inner)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [pack(inner) for inner in value]}
    return value


def unpack(entry: str, value: Any) -> Any:
    """The value that `pack` was given."""
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or next(iter(value)) not in ("tensor", "items", "list", "tuple"):
        raise ValueError(f"{entry} must be packed data, got a dict with {sorted(map(str, value))}")
    ((form, inner),) = value.items()
    if form == "tensor":
        if not isinstance(inner, np.ndarray):
            raise ValueError(f"{entry} must hold arrays as tensors, got {type(inner).__name__}")
        return torch.from_numpy(inner.copy())
    parts = schema.read_items(entry, inner).values
    if form == "items":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in parts):
            raise ValueError(f"{entry} must hold pairs of a key and a value")
        return {key: unpack(f"{entry}[{key!r}]", part) for key, part in parts}
    made = [unpack(f"{entry}[{i}]", part) for i, part in enumerate(parts)]
    return tuple(made) if form == "tuple" else made


def load(entry: str, target: nn.Module | SepSA[RLS], packed: Any) -> None:
    """Load a packed state into a copy, which a failure may leave half loaded."""
    values = unpack(entry, packed)
    for name in not_finite(values, entry):
        raise schema.damaged(name, "finite", "NaN or Inf")
    try:
        target.load_state_dict(values)
    except (AttributeError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{entry} does not fit this module: {error}") from error
