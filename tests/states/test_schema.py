"""What the checks of saved states return, and the words in which they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sepsa.states.schema import Entries, read, settings


def entry(value):
    return Entries("state_dict", {"n": value})


@pytest.mark.parametrize("value", [0, 3, 2.5, 1e300, np.float32(1.5)])
def test_numbers_in_range_are_returned(value):
    assert entry(value).number("n", 0) == value
    assert type(entry(value).number("n", 0)) is float


@pytest.mark.parametrize(
    ("value", "bounds", "words"),
    [
        (-1, {"low": 0}, r"state_dict\['n'\] must be a number of at least 0, got -1: the checkpoint is damaged"),
        (True, {"low": 0}, "got True"),
        ("3", {"low": 0}, "got '3'"),
        (None, {}, "must be a finite number, got None"),
        (math.nan, {}, "must be a finite number, got nan"),
        (math.inf, {"low": 0}, "got inf"),
        pytest.param(10**400, {"low": 0}, "got int", id="huge"),
        (7, {"low": 0, "high": 5}, r"must be a number in \[0, 5\], got 7"),
        (7, {"high": 5}, "must be a number of at most 5, got 7"),
    ],
)
def test_other_numbers_are_refused(value, bounds, words):
    with pytest.raises(ValueError, match=words):
        entry(value).number("n", **bounds)


def test_integers():
    assert type(entry(np.int64(3)).integer("n")) is int
    for value, words in (
        (2.0, "must be an integer of at least 0, got 2.0"),
        (True, "got True"),
        (7, r"an integer in \[0, 5\], got 7"),
    ):
        with pytest.raises(ValueError, match=words):
            entry(value).integer("n", 0, *([5] if value == 7 else []))
    with pytest.raises(ValueError, match="must be an integer of at least 0, got 1000"):
        entry(10**30).integer("n")


def test_tensors_are_copied_into_one_layout_and_device():
    given = torch.randn(3, 2).T
    copy = entry(given).tensor("n", (2, 3), torch.float32)
    assert copy.is_contiguous()
    assert torch.equal(copy, given)
    copy.zero_()
    assert given.abs().max() > 0
    assert entry(given).tensor("n", (2, None), torch.float32, torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, 3), r"must be a tensor of torch\.float64 in dense layout, got a tensor of torch\.float32"),
        (torch.ones(2, 3, dtype=torch.float64).to_sparse(), "in dense layout, got .* layout torch.sparse_coo"),
        (torch.ones(2, 3, dtype=torch.float64, device="meta"), "got a meta tensor"),
        (torch.ones(3, 2), r"must be a tensor of shape \(2, 3\), got \(3, 2\): .* a model of another size"),
        (np.ones((2, 3)), r"must be a tensor of shape \(2, 3\), got an array of float64"),
        (None, r"must be a tensor of shape \(2, 3\), got NoneType"),
        (torch.full((2, 3), math.inf, dtype=torch.float64), "must be finite, got inf: the checkpoint is damaged"),
    ],
)
def test_other_tensors_are_refused(value, words):
    with pytest.raises(ValueError, match=words):
        entry(value).tensor("n", (2, 3), torch.float64)


def test_arrays():
    given = np.array([1.0, math.nan])
    copy = entry(given).array("n", (None,), low=0.0, missing=True)
    copy[:] = 0
    assert given[0] == 1
    for value, words in (
        (given, "must be finite and at least 0, got nan: the checkpoint is damaged"),
        (np.array([1.0, -2.0]), "must be finite and at least 0, got -2.0"),
        (np.array([1, 2]), "must be an array of float64 in dense layout, got an array of int64"),
        (np.ones(3), r"must be an array of shape \(2,\), got \(3,\)"),
        (np.ones((2, 2)), r"must be an array of shape \(2,\), got \(2, 2\)"),
        (torch.ones(2), r"must be an array of shape \(2,\), got a tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            entry(value).array("n", (2,), low=0.0)


def test_dicts_and_lists():
    assert read("state_dict", {"a": 1}, {"a"})["a"] == 1
    with pytest.raises(ValueError, match="state_dict must be a dict, got list"):
        read("state_dict", [], {"a"}, "RLS")
    with pytest.raises(ValueError, match=r"than RLS saves: missing \['a'\], unexpected \['1'\]"):
        read("state_dict", {1: 2}, {"a"}, "RLS")
    nested = entry([{"a": [1, "2"]}]).items("n", 1)
    assert nested.entries(0, {"a"}).items("a").number(0) == 1
    with pytest.raises(ValueError, match=r"state_dict\['n'\]\[0\]\['a'\]\[1\] must be a finite number, got '2'"):
        nested.entries(0, {"a"}).items("a").number(1)
    with pytest.raises(ValueError, match="must be a list of 2 items, got 1 items"):
        entry([1]).items("n", 2)
    with pytest.raises(ValueError, match="must be a list, got int"):
        entry(3).items("n")


def test_settings():
    entry(3).equal("n", 3)
    for value in (3.0, True, np.ones(2), torch.ones(2)):
        with pytest.raises(ValueError, match=r"state_dict\['n'\] must be 3, as this object was made, got"):
            entry(value).equal("n", 3)
    with (
        pytest.raises(ValueError, match="state_dict: forgetting is wrong: the checkpoint is damaged"),
        settings("state_dict"),
    ):
        raise TypeError("forgetting is wrong")
