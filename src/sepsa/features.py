"""Trainable random Fourier features: a body of one layer that a linear head reads well from the first samples on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sepsa.validation import at_least, in_range


class FourierFeatures(nn.Module):
    """x -> [√2 cos(Wx + b), x], with W from a normal law of variance bandwidth²/inputs and b uniform in 0 to 2π.

    Choose it as the body of a regression on standardized inputs, with an `nn.Linear` after it as the head: at the start
    the units are features of a Gaussian kernel's ridge regression, which training then adapts to the target. It
    is the default body of `SepSARegressor.partial_fit`. `skip=False` leaves out the inputs themselves.
    """

    def __init__(self, inputs: int, units: int, *, bandwidth: float = 1.4, skip: bool = True) -> None:
        super().__init__()
        self.inputs, self.units = at_least("inputs", inputs, 1), at_least("units", units, 1)
        self.bandwidth, self.skip = in_range("bandwidth", bandwidth, 0.0, math.inf), skip
        self.weight = nn.Parameter(torch.empty(units, inputs))
        self.bias = nn.Parameter(torch.empty(units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights for the units."""
        nn.init.normal_(self.weight, std=self.bandwidth / math.sqrt(self.inputs))
        nn.init.uniform_(self.bias, 0.0, 2 * math.pi)

    @property
    def out_features(self) -> int:
        """The number of features, the in_features of the head."""
        return self.units + (self.inputs if self.skip else 0)

    def forward(self, x: Tensor) -> Tensor:
        units = math.sqrt(2) * torch.cos(nn.functional.linear(x, self.weight, self.bias))
        return torch.cat([units, x], -1) if self.skip else units

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, units={self.units}, bandwidth={self.bandwidth:g}, skip={self.skip}"
