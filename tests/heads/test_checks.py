"""What the checks of heads and of their states let through and what they refuse, in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sepsa.heads.base.checks import affine_parameters, explain_nonfinite
from sepsa.heads.base.state_checks import check_positive_definite, check_root
from sepsa.states.schema import Entries

STATE = Entries("state_dict", {})


def test_a_matrix_must_be_positive_definite():
    X = torch.randn(4, 9, dtype=torch.float64)
    check_positive_definite(STATE, "H", X @ X.T)
    with pytest.raises(ValueError, match="must be symmetric, got an asymmetry of 1"):
        check_positive_definite(STATE, "H", torch.eye(3) + torch.tensor([[0.0, 1, 0], [0, 0, 0], [0, 0, 0]]))
    with pytest.raises(ValueError, match="must be positive definite, got a matrix without a Cholesky factor"):
        check_positive_definite(STATE, "H", torch.diag(torch.tensor([1.0, -1.0])))


def test_a_root_is_regular_and_bounded_by_the_ridge():
    check_root(STATE, "T", torch.diag(torch.tensor([1e-9, 1.0, 1e-5], dtype=torch.float64)), torch.ones(3))
    with pytest.raises(ValueError, match="must be a regular matrix, got a row or column of zeros"):
        check_root(STATE, "T", torch.zeros(3, 3), torch.ones(3))
    with pytest.raises(ValueError, match="must be a regular matrix, got pivots from 0 to"):
        check_root(STATE, "T", torch.ones(3, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="of at least the ridge, got a larger matrix"):
        check_root(STATE, "T", torch.eye(3), torch.full((3,), 2.0))


def test_a_head_must_be_plain():
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
