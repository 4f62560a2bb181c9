"""The networks of Table II: sizes, shapes and the weights they start from."""

import math

import pytest
import torch
from torch import nn

from reproduction.data import Dataset
from reproduction.networks import cnn, for_dataset


def dataset(inputs, outputs):
    """A data set of three samples, enough to choose a network by."""
    x, y = torch.zeros(3, *inputs), torch.zeros(3, outputs)
    return Dataset("toy", "regression", x, y, x, y)


# By hand from Table II, for the four data sets.
TABLE = [
    ((8,), 2, (8 * 50 + 50) + (50 * 2 + 2)),
    ((10,), 1, (10 * 50 + 50) + (50 * 1 + 1)),
    ((1, 28, 28), 10, (9 * 32 + 32) + 2 * 32 + (32 * 9 * 64 + 64) + 2 * 64 + (7 * 7 * 64 * 128 + 128) + 1290),
    ((3, 32, 32), 10, (27 * 32 + 32) + 2 * 32 + (32 * 9 * 64 + 64) + 2 * 64 + (8 * 8 * 64 * 128 + 128) + 1290),
]


@pytest.mark.parametrize(("inputs", "outputs", "parameters"), TABLE)
def test_every_data_set_gets_its_network_and_the_papers_start(inputs, outputs, parameters):
    torch.manual_seed(0)
    model = for_dataset(dataset(inputs, outputs))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model(torch.randn(5, *inputs)).shape == (5, outputs)
    assert isinstance(model[-1], nn.Linear)
    assert model[-1].out_features == outputs
    affine = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert affine
    for module in affine:
        assert (module.bias == 0.01).all()
        weight = module.weight.detach()
        bound = math.sqrt(6 / weight[0].numel())
        assert weight.abs().max() <= bound
        if weight.numel() >= 10_000:
            assert weight.abs().max() > 0.99 * bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        else:
            assert weight.abs().max() > 0.8 * bound
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_the_layers_of_the_cnn():
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
    model = cnn(3, 32, 10)
    assert [type(module) for module in model] == [*block, *block, nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    # Table II, last column: what each layer hands on.
    shapes = [(32, 32, 32), (32, 16, 16), (64, 16, 16), (64, 8, 8), (128,), (10,)]
    for i, shape in zip((3, 4, 7, 8, 11, 12), shapes, strict=True):
        assert model[:i](torch.zeros(1, 3, 32, 32)).shape == (1, *shape)


@pytest.mark.parametrize("inputs", [(), (3, 8), (3, 8, 9)])
def test_for_dataset_names_a_shape_it_has_no_network_for(inputs):
    with pytest.raises(ValueError, match=r"dataset must have train_inputs of shape .* got \(3"):
        for_dataset(dataset(inputs, 2))
