"""What the checks of states let through and what they refuse, in words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sepsa.heads.base.checks import (
    affine_parameters,
    check_keys,
    check_positive_definite,
    check_root,
    check_state_number,
    check_state_tensor,
    explain_nonfinite,
)


@pytest.mark.parametrize("value", [0, 3, 2.5, 1e300])
def test_numbers_in_range_pass(value):
    check_state_number("n", value, 0)


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        (-1, {"low": 0}, r"state_dict\['n'\] must be a number of at least 0, got -1: the checkpoint is damaged"),
        (True, {"low": 0}, "got True"),
        ("3", {"low": 0}, "got '3'"),
        (None, {}, "must be a finite number, got None"),
        (math.nan, {}, "must be a finite number, got nan"),
        (math.inf, {"low": 0}, "got inf"),
        (10**400, {"low": 0}, "got int"),
        (2.0, {"low": 0, "integer": True}, "must be an integer of at least 0, got 2.0"),
        (7, {"low": 0, "high": 5}, r"must be a number in \[0, 5\], got 7"),
        (7, {"high": 5}, "must be a number of at most 5, got 7"),
    ],
)
def test_other_numbers_are_refused(value, options, words):
    with pytest.raises(ValueError, match=words):
        check_state_number("n", value, **options)


def test_tensors_are_copied_into_one_layout_and_device():
    given = torch.randn(3, 2).T
    copy = check_state_tensor("T", given, (2, 3), dtype=torch.float32)
    assert copy.is_contiguous()
    assert torch.equal(copy, given)
    with pytest.raises(ValueError, match=r"must be a tensor of torch\.float64, .* got torch\.float32"):
        check_state_tensor("T", given, (2, 3), dtype=torch.float64)
    copy.zero_()
    assert given.abs().max() > 0
    assert check_state_tensor("T", given, (2, 3), device=torch.device("meta")).is_meta


def test_a_matrix_must_be_positive_definite():
    X = torch.randn(4, 9, dtype=torch.float64)
    check_positive_definite("H", X @ X.T)
    with pytest.raises(ValueError, match="must be symmetric, got an asymmetry of 1"):
        check_positive_definite("H", torch.eye(3) + torch.tensor([[0.0, 1, 0], [0, 0, 0], [0, 0, 0]]))
    with pytest.raises(ValueError, match="must be positive definite, got a matrix without a Cholesky factor"):
        check_positive_definite("H", torch.diag(torch.tensor([1.0, -1.0])))


def test_a_root_is_regular_and_bounded_by_the_ridge():
    check_root("T", torch.diag(torch.tensor([1e-9, 1.0, 1e-5], dtype=torch.float64)), torch.ones(3))
    with pytest.raises(ValueError, match="must be a regular matrix, got a row or column of zeros"):
        check_root("T", torch.zeros(3, 3), torch.ones(3))
    with pytest.raises(ValueError, match="must be a regular matrix, got pivots from 0 to"):
        check_root("T", torch.ones(3, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="of at least the ridge, got a larger matrix"):
        check_root("T", torch.eye(3), torch.full((3,), 2.0))


def test_keys_and_heads():
    with pytest.raises(ValueError, match=r"state_dict must be a dict of RLS.state_dict\(\), got list"):
        check_keys("RLS", [], {"a"})
    with pytest.raises(ValueError, match=r"missing \['a'\], unexpected \['1'\]"):
        check_keys("RLS", {1: 2}, {"a"})
    head = nn.Linear(2, 2)
    head.weight = nn.Parameter(torch.eye(2).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"16 bits or more, got torch\.float8_e4m3fn"):
        affine_parameters(head)
    head.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="head must have a dense weight"):
        affine_parameters(head)


def test_weights_that_do_not_fit_the_head_are_named():
    head, learned = nn.Linear(2, 1, dtype=torch.float16), torch.full((1, 3), 1e5)
    words = str(explain_nonfinite(torch.ones(1, 2), torch.ones(1, 1), head, learned))
    assert words.startswith("the head's weights must fit into torch.float16, at most 65504, got 100000")
