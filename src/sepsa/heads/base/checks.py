"""Checks of heads, settings and samples, which every solver makes once, before anything changes."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sepsa.heads.protocols import NotFinite
from sepsa.states.schema import kind_of
from sepsa.validation import in_range

# Half of the exponents of float64 are below: the square root of a smaller ridge has an inverse that cannot be squared.
_LEAST_RIDGE = 1e-100


def ridge_setting(value: Any, name: str = "ridge") -> float:
    """A ridge: a positive number that can be inverted and squared."""
    if isinstance(value, str):
        others = "'evidence' for an RLS, SoftmaxNewton or LogisticNewton"
        raise TypeError(f"{name} must be a number in (0, inf), or {others}, got {value!r}")
    if 0 < in_range(name, value, 0.0, math.inf) < _LEAST_RIDGE:
        raise ValueError(
            f"{name} must be at least {_LEAST_RIDGE:g}, got {value}: use 1e-12 for almost no regularization"
        )
    return float(value)


def bias_setting(value: Any) -> float | Literal["ridge"] | None:
    """The setting `bias_ridge`: a number, "ridge" for the ridge of the weights, or None for a small default."""
    if value is None or value == "ridge":
        return value
    if isinstance(value, str):
        raise ValueError(f"bias_ridge must be a number in (0, inf) or 'ridge', got {value!r}")
    return ridge_setting(value, "bias_ridge")


def affine_parameters(linear: object) -> None:
    """Raise an error for anything but a plain nn.Linear with its own parameters."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"head must be an nn.Linear, got {type(linear).__name__}")
    if isinstance(linear.weight, nn.parameter.UninitializedParameter):
        raise ValueError("head is a LazyLinear without weights yet: run the model once on a batch first")
    own_parameters(linear)
    if not linear.weight.is_floating_point() or linear.weight.dtype.itemsize < 2:
        raise TypeError(
            f"head must have real floating weights of 16 bits or more, got {linear.weight.dtype}: call head.float()"
        )
    if linear.weight.layout is not torch.strided or linear.weight.is_nested:
        raise TypeError(f"head must have a dense weight, got {kind_of(linear.weight)}: make it a plain nn.Linear")
    refuse_inference_mode("bind its head")
    for name, value in linear._parameters.items():
        cure = f"write head.{name} = nn.Parameter(head.{name}.detach().clone()) outside torch.inference_mode() first"
        if value is not None and value.is_inference():
            raise ValueError(f"head has a {name} that was made in torch.inference_mode() and cannot learn: {cure}")
        if value is not None and any(s == 0 < n - 1 for s, n in zip(value.stride(), value.shape, strict=True)):
            raise ValueError(
                f"head has an expanded {name} (strides {value.stride()}), whose entries share memory and cannot "
                f"be updated separately: {cure}"
            )


def own_parameters(linear: nn.Linear) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The head's weight and bias; an error where it computes one of them from other parameters."""
    parameters = linear._parameters  # linear.weight takes five times as long, in every step
    weight = parameters.get("weight")
    if weight is None or "bias" not in parameters:
        name = "bias" if weight is not None else "weight"
        raise ValueError(
            f"head computes its {name} from other parameters (pruning, weight_norm, parametrize), and its solver sets "
            f"the {name} itself: make it a plain parameter again, as by torch.nn.utils.prune.remove(head, {name!r}) or "
            f"torch.nn.utils.parametrize.remove_parametrizations(head, {name!r})"
        )
    return weight, parameters["bias"]


def refuse_inference_mode(what: str) -> None:
    """Raise an error in inference mode, where tensors are made that cannot be changed later."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"a head solver cannot {what} inside torch.inference_mode(), whose tensors cannot change outside of it: "
            "leave it, or use torch.no_grad() instead"
        )


def is_new_head(name: str, owned: nn.Linear | None, linear: nn.Linear) -> bool:
    """Whether `linear` is the first head of the solver `name`, which owns `owned`; a second head is an error."""
    affine_parameters(linear)
    if owned is not None and owned is not linear:
        raise ValueError(
            f"this {name} is already bound to another nn.Linear: a solver owns one head, so make a second {name}"
        )
    return owned is None


def check_dtype(dtype: object) -> None:
    """Raise an error for a dtype that no solver computes in."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")


# ---------------------------------------------------------------------- samples


def check_rows(
    linear: nn.Linear, features: Tensor, targets: Tensor | None = None, sample_weight: Tensor | None = None
) -> None:
    """Check the shapes, dtypes and devices of what a head is asked to learn or predict.

    Choose it in `update` and `predict` of your own solver: its errors name the argument, the value and the cure.

    Args:
        linear: The head.
        features: Inputs of the head (..., in_features), at least one sample.
        targets: Floating targets (..., out_features), or None.
        sample_weight: Weights (...), finite and not negative, or None.

    Raises:
        TypeError: An argument is not a dense tensor of a suitable dtype.
        ValueError: A shape, a device or a weight is wrong.
    """
    device = own_parameters(linear)[0].device
    k, m = linear.in_features, linear.out_features
    _check_tensor("features", features, device)
    shape = features.shape
    if not shape or shape[-1] != k:
        raise ValueError(f"features must have shape (..., {k}), the head's in_features, got {tuple(shape)}")
    if 0 in shape:
        raise ValueError(f"features must hold at least one sample, got shape {tuple(shape)}")
    if targets is None:
        return
    if torch.is_inference_mode_enabled():
        refuse_inference_mode("learn")
    dense = isinstance(targets, Tensor) and not targets.is_nested  # a nested tensor has no shape
    if len(shape) > 1 and dense and targets.ndim and targets.shape[0] != shape[0]:
        raise ValueError(f"targets must have {shape[0]} rows, as the features, got shape {tuple(targets.shape)}")
    labels = dense and not targets.is_floating_point() and is_integer(targets)
    if labels and targets.shape in (shape[:-1], (*shape[:-1], 1)):
        raise TypeError(
            f"targets must be floating with shape {(*shape[:-1], m)}, got {targets.dtype} {tuple(targets.shape)}: "
            + _label_cure(targets, targets.ndim == len(shape), m)
        )
    _check_tensor("targets", targets, device)
    if targets.shape[-1:] != (m,) or targets.shape[:-1] != shape[:-1]:
        cure = ": add the missing dimension with targets.unsqueeze(-1)" if targets.shape == shape[:-1] else ""
        raise ValueError(
            f"targets must have shape {(*shape[:-1], m)} for these features, got {tuple(targets.shape)}{cure}"
        )
    if sample_weight is not None:
        check_weight(linear, features, sample_weight)


def _label_cure(labels: Tensor, column: bool, m: int) -> str:
    """The cure in the error for integer labels, in a `column` or not, with a head of m outputs."""
    if m == 1:
        numbers = "targets.float()" if column else "targets.unsqueeze(-1).float()"
        return f'write {numbers}; for labels 0 and 1 take SepSA(..., solver="logistic")'
    if column:
        return f'for class labels take SepSA(..., solver="cross-entropy") and targets.squeeze({labels.ndim - 1})'
    return (
        'for class labels take SepSA(..., solver="cross-entropy"), or for least squares '
        f"torch.nn.functional.one_hot(targets, {m}).float()"
    )


def check_outputs(outputs: Tensor, targets: Tensor, labels: bool = False) -> None:
    """Raise an error for outputs and targets that a loss would broadcast; `labels` lack the outputs' last dimension."""
    given, wanted = outputs.shape, targets.shape
    if (given[:-1] if labels else given) == wanted:
        return
    if labels and wanted == (*given[:-1], 1):
        cure = f": give class labels as targets.squeeze({len(given) - 1})"
    elif len(given) == len(wanted) - 1 + labels:
        cure = ": the model squeezed its output; let it return the head's output, or pass outputs.unsqueeze(-1)"
    elif wanted == given[:-1]:
        cure = ": add the missing dimension with targets.unsqueeze(-1)"
    else:
        cure = ""
    shape = f"{tuple(wanted)} and one dimension more" if labels else f"{tuple(wanted)}"
    raise ValueError(
        f"outputs must have the shape of targets, {shape}, got outputs {tuple(given)} and targets {tuple(wanted)}{cure}"
    )


def is_integer(targets: object) -> bool:
    """Whether targets are a plain tensor of integers or booleans."""
    return (
        isinstance(targets, Tensor)
        and targets.layout is torch.strided
        and not (targets.is_nested or targets.is_quantized or targets.is_floating_point() or targets.is_complex())
    )


def check_labels(linear: nn.Linear, features: Tensor, labels: Tensor, sample_weight: Tensor | None = None) -> None:
    """Check the shape and device of integer labels, and weights, for checked features; not yet the labels' range."""
    refuse_inference_mode("learn")
    if labels.device != features.device:
        raise ValueError(f"targets must be on {features.device}, where the head is, got {labels.device}")
    check_weight(linear, features, sample_weight)


def check_classes(linear: nn.Linear, features: Tensor, targets: Tensor, sample_weight: Tensor | None) -> None:
    """Check samples whose targets are class labels (...) or probabilities (..., m); not yet the targets' range."""
    check_rows(linear, features)
    if is_integer(targets) and targets.dtype != torch.bool and targets.shape == features.shape[:-1]:
        check_labels(linear, features, targets, sample_weight)
    else:
        check_rows(linear, features, targets, sample_weight)


def check_weight(linear: nn.Linear, features: Tensor, sample_weight: Tensor | None) -> None:
    """Check the weights of samples whose features are checked already."""
    if sample_weight is None:
        return
    shape = features.shape
    _check_tensor("sample_weight", sample_weight, linear.weight.device)
    if sample_weight.shape != shape[:-1]:
        raise ValueError(
            f"sample_weight must have shape {tuple(shape[:-1])}, one number a sample, got {tuple(sample_weight.shape)}"
        )
    if not bool(((sample_weight >= 0) & (sample_weight < math.inf)).all()):
        worst = sample_weight[~((sample_weight >= 0) & (sample_weight < math.inf))][0].item()
        raise ValueError(f"sample_weight must be finite and at least 0, got {worst:g}")


def _check_tensor(name: str, value: object, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}: use torch.as_tensor({name})")
    if value.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: use torch.nested.to_padded_tensor({name}, 0.0)"
        )
    if value.is_quantized:
        raise TypeError(f"{name} must be floating point, got quantized {value.dtype}: call {name}.dequantize()")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}: call {name}.to_dense()")
    if value.is_complex():
        raise TypeError(f"{name} must be floating point, got {value.dtype}: call torch.view_as_real({name})")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}: call {name}.float()")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, where the head is, got {value.device}")
    if value.is_meta:
        raise ValueError(f"{name} must hold numbers, got a meta tensor: move the head and the data to a real device")


def explain_nonfinite(
    features: Tensor, targets: Tensor | None, linear: nn.Linear, learned: Tensor | None = None
) -> NotFinite:
    """The error for values that a head cannot learn; called only where something is known to be wrong.

    `learned` (m, p) are the weights that the update computed, in the solver's dtype, if it got that far.
    """
    head = (("the head's weight", linear.weight), ("the head's bias", linear.bias))
    for name, value in (("features", features), ("targets", targets), *head):
        if value is not None and not bool(torch.isfinite(value).all()):
            bad = value[~torch.isfinite(value)]
            return NotFinite(
                f"{name} must be finite, got {bad[0].item()} ({bad.numel()} of {value.numel()} values are NaN or Inf): "
                "nothing was learned; drop or repair these samples, or lower the body's learning rate if it diverged"
            )
    dtype = linear.weight.dtype
    if learned is not None and bool(learned.isfinite().all()) and not bool(learned.to(dtype).isfinite().all()):
        return NotFinite(
            f"the head's weights must fit into {dtype}, at most {torch.finfo(dtype).max:g}, got "
            f"{float(learned.abs().max()):g}: nothing was learned; rescale the targets, or make the head float32"
        )
    largest = max(float(v.detach().abs().max()) for v in (features, targets) if v is not None)
    return NotFinite(
        f"features and targets must be small enough to square, got {largest:g}: nothing was learned; rescale them"
    )
