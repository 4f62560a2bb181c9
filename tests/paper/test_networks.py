"""The networks of Table II: sizes, shapes and the weights they start from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sepsa.paper.data import Dataset
from sepsa.paper.networks import cnn, fnn, for_dataset, initialize


def dataset(inputs, outputs):
    """A data set of three samples, enough to choose a network by."""
    x, y = torch.zeros(3, *inputs), torch.zeros(3, outputs)
    return Dataset("toy", "regression", x, y, x, y)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def affine(model):
    return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


# By hand from Table II, for the four data sets.
TABLE = [
    ((8,), 2, (8 * 50 + 50) + (50 * 2 + 2)),
    ((10,), 1, (10 * 50 + 50) + (50 * 1 + 1)),
    ((1, 28, 28), 10, (9 * 32 + 32) + 2 * 32 + (32 * 9 * 64 + 64) + 2 * 64 + (7 * 7 * 64 * 128 + 128) + 1290),
    ((3, 32, 32), 10, (27 * 32 + 32) + 2 * 32 + (32 * 9 * 64 + 64) + 2 * 64 + (8 * 8 * 64 * 128 + 128) + 1290),
]


@pytest.mark.parametrize(("inputs", "outputs", "parameters"), TABLE)
def test_every_data_set_gets_its_network(inputs, outputs, parameters):
    model = for_dataset(dataset(inputs, outputs))
    assert count(model) == parameters
    assert model(torch.randn(5, *inputs)).shape == (5, outputs)
    assert isinstance(model[-1], nn.Linear)
    assert model[-1].out_features == outputs


def test_the_layers_of_the_fnn():
    assert [type(module) for module in fnn(8, 2)] == [nn.Linear, nn.ReLU, nn.Linear]


def test_the_layers_of_the_cnn():
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
    model = cnn(3, 32, 10)
    assert [type(module) for module in model] == [*block, *block, nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    # Table II, last column: what each layer hands on.
    x, shapes = torch.zeros(1, 3, 32, 32), []
    for module in model:
        x = module(x)
        shapes.append(tuple(x.shape[1:]))
    assert [shapes[i] for i in (2, 3, 6, 7, 10, 11)] == [
        (32, 32, 32),
        (32, 16, 16),
        (64, 16, 16),
        (64, 8, 8),
        (128,),
        (10,),
    ]


@pytest.mark.parametrize("size", [4, 5, 7, 30])
def test_the_cnn_takes_any_size_that_can_be_halved_twice(size):
    assert cnn(1, size, 3)(torch.randn(2, 1, size, size)).shape == (2, 3)


def test_the_cnn_names_a_size_too_small():
    with pytest.raises(ValueError, match=r"size must be at least 4.* got 3"):
        cnn(1, 3, 10)


@pytest.mark.parametrize(("inputs", "outputs"), [row[:2] for row in TABLE])
def test_the_papers_start(inputs, outputs):
    torch.manual_seed(0)
    model = for_dataset(dataset(inputs, outputs))
    assert affine(model)
    for module in affine(model):
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


@pytest.mark.parametrize(("inputs", "outputs"), [row[:2] for row in TABLE])
def test_pytorchs_start(inputs, outputs):
    torch.manual_seed(0)
    model = for_dataset(dataset(inputs, outputs), default_init=True)
    torch.manual_seed(0)
    plain = fnn(inputs[0], outputs) if len(inputs) == 1 else cnn(inputs[0], inputs[1], outputs)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_one_seed_gives_one_network():
    states = []
    for _ in range(2):
        torch.manual_seed(233)
        states.append(for_dataset(dataset((1, 28, 28), 10)).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_initialize_leaves_other_layers_alone_and_takes_layers_without_bias():
    model = nn.Sequential(nn.Conv1d(2, 3, 3, bias=False), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 1, bias=False))
    before = model[0].weight.detach().clone()
    initialize(model)
    assert not torch.equal(model[0].weight, before)
    assert (model[1].weight == 1).all()
    assert (model[1].bias == 0).all()


@pytest.mark.parametrize("inputs", [(), (3, 8), (3, 8, 9)])
def test_for_dataset_names_a_shape_it_has_no_network_for(inputs):
    with pytest.raises(ValueError, match=r"dataset must have train_inputs of shape .* got \(3"):
        for_dataset(dataset(inputs, 2))
