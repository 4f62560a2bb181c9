"""A head's weight and bias as one matrix W (m, p), where p counts the bias as a last feature that is always 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sepsa.heads.base.checks import check_rows, explain_nonfinite, own_parameters
from sepsa.heads.base.ridge import BiasRidge, bias_bounds


def width(linear: nn.Linear) -> int:
    """p, the columns of W."""
    return linear.in_features + (linear.bias is not None)


def place_of(linear: nn.Linear) -> tuple[int, int | None]:
    """The addresses of weight and bias."""
    weight, bias = own_parameters(linear)
    return weight.data_ptr(), None if bias is None else bias.data_ptr()


def join(linear: nn.Linear) -> Tensor:
    """The head's weight, with its bias as a last column if it has one: (m, p), a copy in its dtype."""
    weight, bias = own_parameters(linear)
    return weight.detach().clone() if bias is None else torch.cat([weight.detach(), bias.detach()[:, None]], 1)


def start(linear: nn.Linear, dtype: torch.dtype | None) -> Tensor:
    """W as it is, in this dtype or, for None, in float64, which MPS does not have."""
    return join(linear).to(dtype or (torch.float32 if linear.weight.device.type == "mps" else torch.float64))


def ridges(linear: nn.Linear, ridge: float, bias_ridge: BiasRidge, like: Tensor) -> Tensor:
    """The ridge (p,) of each column of W, in the dtype and on the device of `like`."""
    each = torch.full((width(linear),), ridge, dtype=like.dtype, device=like.device)
    if linear.bias is not None:
        each[-1].clamp_(*bias_bounds(bias_ridge, like.dtype))
    return each


def bias_words(bias_ridge: BiasRidge) -> str:
    """The setting for a repr, where it is not the default."""
    return "" if bias_ridge is None else f", bias_ridge={bias_ridge!r}"


def follow(linear: nn.Linear, W: Tensor) -> Tensor:
    """W with changes made to the head from outside, without the rounding to the head's dtype."""
    held = join(linear)
    return W + (held.to(W.dtype) - W.to(held.dtype).to(W.dtype))


def rows(linear: nn.Linear, features: Tensor, dtype: torch.dtype) -> Tensor:
    """Φ (n, p) of features (..., in_features)."""
    x = features.detach().reshape(-1, linear.in_features).to(dtype)
    return x if linear.bias is None else torch.cat([x, x.new_ones(len(x), 1)], 1)


def rows_to_predict(linear: nn.Linear, features: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Φ (n, p) of features, checked, and W (m, p) with changes made to the head from outside."""
    check_rows(linear, features)
    Phi = rows(linear, features, W.dtype)
    if not bool(Phi.square().sum().isfinite()):
        raise explain_nonfinite(features, None, linear)
    return Phi, follow(linear, W)


def as_outputs(linear: nn.Linear, features: Tensor, rows: Tensor) -> Tensor:
    """Rows (n, m), one for each row of features (..., in_features), as the head returns them: (..., m) in its dtype."""
    return rows.reshape(*features.shape[:-1], rows.shape[1]).to(linear.weight.dtype)


def samples(
    linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float]:
    """Φ (n, p) and Y (n, m), each row scaled by the root of its sample's weight, and the weights' sum."""
    Phi = rows(linear, features, dtype)
    Y = targets.detach().reshape(len(Phi), -1).to(dtype)
    if sample_weight is None:
        return Phi, Y, float(len(Phi))
    omega = sample_weight.detach().reshape(-1, 1).to(dtype)
    return Phi * omega.sqrt(), Y * omega.sqrt(), float(omega.sum())


def store(linear: nn.Linear, head: Tensor) -> None:
    """Copy W (m, p), already in the head's dtype, into the head: nothing is allocated, so nothing can fail."""
    weight, bias = own_parameters(linear)
    weight.detach().copy_(head if bias is None else head[:, :-1])
    if bias is not None:
        bias.detach().copy_(head[:, -1])


def commit(write: Callable[[], object]) -> None:
    """Store a result that was computed before, so that an interrupt cannot leave it half stored.

    Choose it in `update` of your own solver: compute everything first, then call `commit` with the assignments.

    Args:
        write: A function that assigns the result. It must be safe to run twice: after an exception in it, such as
            Ctrl-C, it runs again before the exception is raised.
    """
    try:
        write()
    except BaseException:
        write()
        raise
