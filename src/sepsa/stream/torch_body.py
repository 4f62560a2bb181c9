"""The learner of rows with any torch body: `Learner`'s scales and replay over `sepsa.SepSA` instead of the engine.

It takes the same steps as the engine does: with g the gain of each output, the head learns the batch by recursive least
squares and then the body follows the gradient of mean ω g (Wφ - y)² at the new head.
"""

from __future__ import annotations

import math
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from sepsa.heads import RLS
from sepsa.optimizer import SepSA
from sepsa.stream import kernels
from sepsa.stream.engine import Floats
from sepsa.stream.learner import Learner, balance

BASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nag": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adam": (torch.optim.Adam, {}),
}


class TorchLearner(Learner):
    """A `Learner` whose body is a copy of `module`, an `nn.Module` from (n, inputs) to (n, k).

    Choose it where a multilayer perceptron will not do; a step costs a hundred times the engine's.
    """

    engine: TorchEngine  # type: ignore[assignment]

    def _new_engine(self, inputs: int, outputs: int) -> TorchEngine:  # type: ignore[override]
        engine = TorchEngine(inputs, outputs, **self.options)
        if not self.regression:
            engine.part("GAIN")[:] = 1.0
        return engine

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before each batch was learned."""
        weight = np.ones(len(X)) if weight is None else weight
        one_step = self.settled and len(X) <= self.engine.layout.numbers[kernels.L_BATCH]
        before = None if one_step else deepcopy(self.__dict__)  # a single step is refused before it changes anything
        try:
            return self._engine_learn(X, Y, weight) if self.settled else self._settle(X, Y, weight)
        except BaseException:
            self.__dict__.update(before or {})
            raise

    def recount(self, samples: float, noise: Floats) -> None:
        solver = self.engine.solver
        state = solver.state_dict()
        passes = max(1.0, solver.samples / samples)
        state["Z"][: state["Z"].shape[1]] *= math.sqrt(passes)
        state["ridge_left"] /= passes
        state["mass"] /= passes
        solver.load_state_dict(state)
        penalty, left = self._balance()
        state["energy"].copy_(torch.from_numpy(noise * left + penalty))
        solver.load_state_dict(state)

    def noise(self) -> Floats:
        penalty, left = self._balance()
        energy: Floats = self.engine.solver.state_dict()["energy"].numpy(force=True)
        return np.maximum(energy - penalty, 0.0) / left

    def _balance(self) -> tuple[Floats, float]:
        solver, head = self.engine.solver, self.engine.optimizer.head
        state = solver.state_dict()
        ridge = state["ridge_left"].numpy(force=True)
        W = torch.cat([head.weight.detach(), head.bias.detach()[:, None]], 1).to(state["prior"])
        penalty: Floats = (W - state["prior"]).square().numpy(force=True) @ ridge
        free = len(ridge) - float(solver.covariance().diagonal().numpy(force=True) @ ridge)
        return balance(penalty, solver.samples, free)


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
        self.solver = RLS(ridge=ridge, forgetting=forgetting)
        self.optimizer = SepSA(
            nn.Sequential(body, head), base, head="1", solver=self.solver, lr=lr, weight_decay=weight_decay, **options
        )
        self.layout = SimpleNamespace(inputs=inputs, outputs=outputs, numbers={kernels.L_BATCH: batch})
        self.parts = {"MEAN": np.zeros(inputs), "SCALE": np.zeros(inputs), "GAIN": np.zeros(outputs)}
        self._chance = torch.Generator().manual_seed(seed).get_state()  # for what is random in the body, as dropout

    def part(self, name: str) -> Floats:
        return self.parts[name]

    @property
    def samples(self) -> float:
        return self.solver.samples

    def learn(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        out = np.empty_like(Y)
        batch = self.layout.numbers[kernels.L_BATCH]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(self._chance)
            for at in range(0, len(X), batch):
                some = slice(at, at + batch)
                out[some] = self._step(X[some], Y[some], weight[some])
            self._chance = torch.get_rng_state()
        return out

    def _step(self, X: Floats, Y: Floats, weight: Floats) -> Floats:
        before = self.predict(X)
        if not np.isfinite(before).all():
            raise FloatingPointError(
                "the module's output is not finite: nothing was learned; lower learning_rate, or rescale the inputs"
            )
        seen = weight > 0
        if not seen.any():
            return before
        self._wake(X[seen], Y[seen])
        body: nn.Module = self.optimizer.model.train()[0]  # type: ignore[index]
        features, y, w = body(self._tensor(X, scaled=True)), self._tensor(Y), self._tensor(weight)
        with self.optimizer.observe(y, w):
            outputs = self.optimizer.head(features)
        if features.requires_grad:
            loss = (w[:, None] * self._tensor(self.parts["GAIN"]) * (outputs - y) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return before

    def _wake(self, X: Floats, Y: Floats) -> None:
        """A scale for what was constant and now is not, as `kernels.wake`."""
        mean, scale, gain = (self.parts[name] for name in ("MEAN", "SCALE", "GAIN"))
        for j in np.flatnonzero(scale == 0):
            off = np.abs(X[:, j] - mean[j])
            off = off[off > kernels._ROUNDING * np.abs(X[:, j])]
            scale[j] = 1 / off[0] if off.size else 0.0
        for k in np.flatnonzero(gain == 0):
            off = Y[Y[:, k] != 0, k]
            gain[k] = 1 / off[0] ** 2 if off.size else 0.0

    def _tensor(self, values: Floats, scaled: bool = False) -> Tensor:
        values = (values - self.parts["MEAN"]) * self.parts["SCALE"] if scaled else values
        return torch.as_tensor(values).to(self.optimizer.head.weight)

    @torch.no_grad()
    def _features(self, X: Floats) -> Tensor:
        features: Tensor = self.optimizer.model.eval()[0](self._tensor(X, scaled=True))  # type: ignore[index]
        return features

    def predict(self, X: Floats) -> Floats:
        with torch.no_grad():
            outputs: Floats = self.optimizer.head(self._features(X)).double().numpy(force=True)
        return outputs

    def predict_with_spread(self, X: Floats) -> tuple[Floats, Floats]:
        features = self._features(X)
        phi = torch.cat([features, features.new_ones(len(features), 1)], 1)
        B = self.solver.covariance()
        spread: Floats = torch.einsum("np,pq,nq->n", phi.to(B), B, phi.to(B)).numpy(force=True)
        with torch.no_grad():
            return self.optimizer.head(features).double().numpy(force=True), spread

    def grow(self, inputs: int, outputs: int) -> None:
        """Make room for more outputs, as if they had been there, at zero, from the start."""
        old, more = self.optimizer.head, outputs - self.layout.outputs
        head = zero_head(old.in_features, outputs, old.weight)
        head.weight.data[: self.layout.outputs], head.bias.data[: self.layout.outputs] = old.weight.data, old.bias.data
        state = self.solver.state_dict()
        for name in ("Z", "energy", "prior"):
            state[name] = torch.cat([state[name], state[name].new_zeros(more, *state[name].shape[1:])])
        self.solver = RLS(ridge=self.solver.ridge, forgetting=self.solver.forgetting)
        model = nn.Sequential(self.optimizer.model[0], head)  # type: ignore[index]
        self.optimizer = SepSA(model, self.optimizer.base, head="1", solver=self.solver)
        self.solver.load_state_dict(state)
        self.layout.outputs = outputs
        self.parts["GAIN"] = np.concatenate([self.parts["GAIN"], np.zeros(more)])


def zero_head(features: int, outputs: int, like: Tensor) -> nn.Linear:
    """A head at zero, where and in what `like` is; nothing is drawn from torch's random numbers for it."""
    head: nn.Linear = skip_init(nn.Linear, features, outputs, device=like.device, dtype=like.dtype)  # type: ignore
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head
