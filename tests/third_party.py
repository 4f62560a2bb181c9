"""A head solver as somebody else would write it: the public protocols of `sepsa.heads`, and nothing of ours inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sepsa import NotFinite


class LMS:
    """Least mean squares: one gradient step on the squared error of each update, by calling its own head."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate, self.steps, self.linear = rate, 0, None

    def bind(self, linear: nn.Linear) -> LMS:
        self.linear = linear
        return self

    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        with torch.no_grad():
            weight, bias = self._learned(features, targets, sample_weight)
            if not bool(weight.isfinite().all() and bias.isfinite().all()):
                raise NotFinite("features and targets must be finite: nothing was learned")
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(bias)
        self.steps += 1

    def _learned(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        error = targets - self.linear(features)
        if sample_weight is not None:
            error = error * sample_weight[..., None]
        rows, error = features.reshape(-1, features.shape[-1]), error.reshape(-1, error.shape[-1])
        step = self.rate / len(rows)
        return self.linear.weight + step * error.T @ rows, self.linear.bias + step * error.sum(0)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rate, self.steps = state_dict["rate"], state_dict["steps"]


class RevertibleLMS(LMS):
    """The same, able to take an update back."""

    def checkpoint(self) -> Any:
        return self.steps, self.linear.weight.detach().clone(), self.linear.bias.detach().clone()

    def rollback(self, checkpoint: Any) -> None:
        self.steps, weight, bias = checkpoint
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(bias)


class CapturableLMS(LMS):
    """The same inside a CUDA graph, whose replays it does not count."""

    def prepare_capture(self) -> int:
        return self.linear.weight.data_ptr()

    def update_captured(self, features: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            weight, bias = self._learned(features, targets, None)
            finite = weight.isfinite().all() & bias.isfinite().all()
            self.linear.weight.copy_(torch.where(finite, weight, self.linear.weight))
            self.linear.bias.copy_(torch.where(finite, bias, self.linear.bias))
        return finite

    def replays(self) -> None:
        """Any number of updates may run before the next `prepare_capture`."""

    def finish_captured(self) -> None:
        """Nothing is left undone."""
