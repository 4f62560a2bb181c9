"""The learner of rows with any torch body: `Learner`'s scales and replay over `sepsa.SepSA` instead of the engine.

It takes the same steps as the engine does: with g the gain of each output, the head learns the batch by recursive least
squares and then the body follows the gradient of mean ω g (Wφ - y)² at the new head.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sepsa.heads import RLS
from sepsa.heads.protocols import NotFinite
from sepsa.optimizer import SepSA
from sepsa.states import schema
from sepsa.stream import kernels
from sepsa.stream.engine import Floats, residual_degrees
from sepsa.stream.learner import Learner

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nag": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adam": (torch.optim.Adam, {}),
    "auto": (torch.optim.Adam, {"betas": (0.0, 0.999)}),
}


class TorchLearner(Learner):
    """A `Learner` whose body is a copy of `module`, an `nn.Module` from (n, inputs) to (n, k).

    Choose it where a multilayer perceptron will not do; a step costs a hundred times the engine's.
    """

    engine: TorchEngine  # type: ignore[assignment]

    def _new_engine(self, inputs: int, outputs: int) -> TorchEngine:  # type: ignore[override]
        engine = TorchEngine(inputs, outputs, seed=self.seed, **self.options)
        if not self.regression:
            engine.set_output_weights(1.0)
        return engine

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before each batch was learned."""
        weight = np.ones(len(X)) if weight is None else weight
        other = self.copy()
        out = other._engine_learn(X, Y, weight) if other.warm else other._learn_first_rows(X, Y, weight)
        self.__dict__.update(other.__dict__)
        return out


class TorchEngine:
    """What `Learner` asks of an engine, with a torch body: steps, scales, growth."""

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
        self.optimizer = SepSA(
            nn.Sequential(body, head), base, head="1", solver=self.solver, lr=lr, weight_decay=weight_decay, **options
        )
        self.inputs, self.outputs, self.batch_size = inputs, outputs, batch
        self._mean, self._scale, self._output_weights = np.zeros(inputs), np.zeros(inputs), np.zeros(outputs)
        self._rng_state = torch.Generator().manual_seed(seed).get_state()  # for what is random in the body, as dropout

    def copy(self) -> TorchEngine:
        """Another engine in the same state."""
        return deepcopy(self)

    @property
    def samples(self) -> float:
        return self.solver.samples

    @property
    def outliers(self) -> int:
        """None: every row is taken at its word."""
        return 0

    @property
    def chosen(self) -> dict[str, Any]:
        """The one head there is, as `Engine.chosen` tells it."""
        head = {"features": "hidden", "ridge": self.solver.ridge, "forgetting": self.solver.forgetting}
        return head | {"since": 0, "weights": [1.0]}

    def scaling(self) -> tuple[Floats, Floats]:
        """Mean and scale (inputs,) by which the network sees (x - mean) · scale, as copies."""
        return self._mean.copy(), self._scale.copy()

    def set_scaling(self, mean: Floats, scale: Floats, first: int = 0) -> None:
        """Let the network see (x - mean) · scale, from input `first` on; a scale of zero waits for a value."""
        self._mean[first:], self._scale[first:] = mean, scale

    def set_typical_inputs(self, distances: Floats | float, first: int = 0) -> None:
        """Nothing: inputs are seen as far out as they lie."""

    def set_output_weights(self, weights: Floats | float) -> None:
        """Let each output's squared error count so much in the body's loss; zero waits for a value."""
        self._output_weights[:] = weights

    def schedule(self) -> tuple[float, float, int]:
        """The body's rate, the head's forgetting and the rows of a batch."""
        return float(self.optimizer.base.param_groups[0]["lr"]), float(self.solver.forgetting), self.batch_size

    def set_schedule(self, lr: float, forgetting: float, batch: int) -> None:
        """Learn by these from now on."""
        for group in self.optimizer.base.param_groups:
            group["lr"] = lr
        self.solver.forgetting, self.batch_size = forgetting, batch

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions, as `Engine.noise_variance`."""
        penalty, left = self._penalty_and_degrees_left()
        energy: Floats = self.solver.state_dict()["energy"].numpy(force=True)
        return np.maximum(energy - penalty, 0.0) / left

    def set_effective_samples(self, samples: float, noise: Floats) -> None:
        """Let what the head knows stand for so many samples, as `Engine.set_effective_samples`."""
        state = self.solver.state_dict()
        passes = max(1.0, float(self.solver.samples / samples))
        state["T"] *= math.sqrt(passes)  # B = TᵀT
        for name in ("left", "samples"):
            state[name] = state[name] / passes
        ridge, of_bias = state["ridges"]
        state["ridges"] = [ridge / passes, of_bias]  # "ridge": that of the weights
        if state["forgetting"] == 1.0 and bool((state["left"] < ridge / passes).any()):
            state["forgetting"] = 1 - 1e-9  # a schedule has forgotten some of the ridge, which so comes back in turn
        self.solver.load_state_dict(state)
        penalty, left = self._penalty_and_degrees_left()
        state["energy"].copy_(torch.from_numpy(noise * left + penalty))
        self.solver.load_state_dict(state)

    def _penalty_and_degrees_left(self) -> tuple[Floats, float]:
        head = self.optimizer.head
        state = self.solver.state_dict()
        ridge = state["left"].numpy(force=True)
        W = torch.cat([head.weight.detach(), head.bias.detach()[:, None]], 1).to(state["prior"])
        penalty: Floats = (W - state["prior"]).square().numpy(force=True) @ ridge
        free = len(ridge) - float(self.solver.covariance().diagonal().numpy(force=True) @ ridge)
        return residual_degrees(penalty, self.solver.samples, free)

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """All that a further step depends on, as plain data."""
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
        """Continue from such a state. Whole, or ValueError naming the entry and nothing."""
        keys = {"inputs", "outputs", "mean", "scale", "output_weights", "generator", "model", "optimizer"}
        new = schema.read(entry, state_dict, keys)
        new.equal("inputs", self.inputs)
        other = self.copy()
        outputs = new.integer("outputs", 1)
        if outputs != self.outputs:
            other.resize(self.inputs, outputs)
        other._mean = new.array("mean", (self.inputs,))
        other._scale = new.array("scale", (self.inputs,), low=0.0)
        other._output_weights = new.array("output_weights", (outputs,), low=0.0)
        other._rng_state = torch.from_numpy(new.array("generator", tuple(self._rng_state.shape), np.uint8))
        load(new.path("model"), other.optimizer.model, new["model"])
        load(new.path("optimizer"), other.optimizer, new["optimizer"])
        self.__dict__.update(other.__dict__)

    # ------------------------------------------------------------------ learning

    def learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
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
                "the module's output is not finite: nothing was learned; lower learning_rate, or rescale the inputs"
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
        """A scale for what was constant and now is not, as `kernels.scale_constant_inputs`."""
        mean, scale, gain = self._mean, self._scale, self._output_weights
        for j in np.flatnonzero(scale == 0):
            off = np.abs(X[:, j] - mean[j])
            off = off[off > kernels._ROUNDING * np.abs(X[:, j])]
            scale[j] = 1 / off[0] if off.size else 0.0
        for k in np.flatnonzero(gain == 0):
            off = Y[Y[:, k] != 0, k]
            gain[k] = 1 / off[0] ** 2 if off.size else 0.0

    def _tensor(self, values: Floats, scaled: bool = False) -> Tensor:
        values = np.nan_to_num((values - self._mean) * self._scale, nan=0.0, posinf=np.inf) if scaled else values
        return torch.as_tensor(values).to(self.optimizer.head.weight)

    @torch.no_grad()
    def _features(self, X: Floats) -> Tensor:
        features: Tensor = self.optimizer.model.eval()[0](self._tensor(X, scaled=True))  # type: ignore[index]
        return features

    def predict(self, X: Floats) -> Floats:
        with torch.no_grad():
            outputs: Floats = self.optimizer.head(self._features(X)).double().numpy(force=True)
        return outputs

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        features = self._features(X)
        phi = torch.cat([features, features.new_ones(len(features), 1)], 1)
        B = self.solver.covariance()
        leverage: Floats = torch.einsum("np,pq,nq->n", phi.to(B), B, phi.to(B)).numpy(force=True)
        with torch.no_grad():
            return self.optimizer.head(features).double().numpy(force=True), leverage

    def resize(self, inputs: int, outputs: int) -> None:
        """More outputs, as if they had been there, at zero, from the start."""
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
    """A head at zero, where and in what `like` is; nothing is drawn from torch's random numbers for it."""
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
    """What `pack` was given."""
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
    """Load what was packed into a copy that may be thrown away."""
    values = unpack(entry, packed)
    check_finite(entry, values)
    try:
        target.load_state_dict(values)
    except (AttributeError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{entry} does not fit this module: {error}") from error


def check_finite(entry: str, value: Any) -> None:
    """Refuse a tensor that holds NaN or Inf, however deep."""
    if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise schema.damaged(entry, "finite", "NaN or Inf")
    for key, inner in value.items() if isinstance(value, dict) else ():
        check_finite(f"{entry}[{key!r}]", inner)
    for i, inner in enumerate(value) if isinstance(value, (list, tuple)) else ():
        check_finite(f"{entry}[{i}]", inner)
