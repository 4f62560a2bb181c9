"""The networks of the paper's Table II and their initial weights."""

from __future__ import annotations

from torch import nn

from reproduction.data import Dataset


def fnn(inputs: int, outputs: int) -> nn.Sequential:
    """One hidden layer of 50 units, for the regressions: (n, inputs) to (n, outputs)."""
    return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, outputs))


def cnn(channels: int, size: int, outputs: int) -> nn.Sequential:
    """Two convolutions and a hidden layer of 128 units, for images: (n, channels, size, size) to (n, outputs)."""
    if size < 4:
        raise ValueError(f"size must be at least 4, because the images are halved twice, got {size}")
    layers: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * (size // 2 // 2) ** 2, 128), nn.ReLU(), nn.Linear(128, outputs)]
    return nn.Sequential(*layers)


def initialize(model: nn.Module) -> None:
    """Initialize in place as in the paper: Kaiming-uniform weights (fan_in, ReLU) and biases of 0.01, also the head's.

    Batch normalization keeps PyTorch's initial values.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_uniform_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.01)


def for_dataset(dataset: Dataset, default_init: bool = False) -> nn.Sequential:
    """The paper's network for this data set, its last module the head.

    It is initialized as in the paper, or with `default_init` as PyTorch initializes its layers.
    """
    shape = dataset.train_inputs.shape[1:]
    if len(shape) == 1:
        model = fnn(shape[0], dataset.n_outputs)
    elif len(shape) == 3 and shape[1] == shape[2]:
        model = cnn(shape[0], shape[1], dataset.n_outputs)
    else:
        raise ValueError(
            "dataset must have train_inputs of shape (n, features) or (n, channels, size, size), "
            f"got {tuple(dataset.train_inputs.shape)}"
        )
    if not default_init:
        initialize(model)
    return model
