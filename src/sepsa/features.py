"""Trainable random Fourier features: a body of one layer on which a linear head fits well from the first samples on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sepsa.validation import at_least, in_range


class FourierFeatures(nn.Module):
    """A layer x -> [√2 cos(Wx + b), x] of trainable random Fourier features.

    Choose it as the body of a regression on standardized inputs, with an `nn.Linear` after it as the head. At the start
    the head's fit is kernel ridge regression with an approximate Gaussian kernel; training adapts the features to the
    target. It is the default body of `SepSARegressor.partial_fit`. W is drawn from a normal distribution of variance
    bandwidth²/inputs, b uniformly from 0 to 2π.

    Args:
        inputs: Number of inputs.
        units: Number of cosines.
        bandwidth: Scale of the frequencies; larger values fit faster variations of the target.
        skip: Whether the inputs themselves are features too.

    Examples:
        >>> import torch
        >>> from sepsa import FourierFeatures
        >>> body = FourierFeatures(3, 16)
        >>> model = torch.nn.Sequential(body, torch.nn.Linear(body.out_features, 1))
        >>> model(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    def __init__(self, inputs: int, units: int, *, bandwidth: float = 1.4, skip: bool = True) -> None:
        super().__init__()
        self.inputs, self.units = at_least("inputs", inputs, 1), at_least("units", units, 1)
        self.bandwidth, self.skip = in_range("bandwidth", bandwidth, 0.0, math.inf), skip
        self.weight = nn.Parameter(torch.empty(units, inputs))
        self.bias = nn.Parameter(torch.empty(units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights and biases."""
        nn.init.normal_(self.weight, std=self.bandwidth / math.sqrt(self.inputs))
        nn.init.uniform_(self.bias, 0.0, 2 * math.pi)

    @property
    def out_features(self) -> int:
        """The number of features, which is the in_features of the head."""
        return self.units + (self.inputs if self.skip else 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features.

        Args:
            x: Inputs (..., inputs).

        Returns:
            Features (..., out_features).
        """
        units = math.sqrt(2) * torch.cos(nn.functional.linear(x, self.weight, self.bias))
        return torch.cat([units, x], -1) if self.skip else units

    def extra_repr(self) -> str:
        return f"inputs={self.inputs}, units={self.units}, bandwidth={self.bandwidth:g}, skip={self.skip}"
