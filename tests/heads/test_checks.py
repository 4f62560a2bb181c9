"""What the checks of heads and of their states let through and what they refuse, in words."""

import math

import pytest
import torch
from torch import nn

from sepsa import RLS
from sepsa.heads.base.checks import check_rows, explain_nonfinite
from sepsa.heads.base.state_checks import check_positive_definite, check_regular
from sepsa.states.schema import Entries

STATE = Entries("state_dict", {})


def test_a_matrix_must_be_positive_definite():
    X = torch.randn(4, 9, dtype=torch.float64)
    check_positive_definite(STATE, "H", X @ X.T)
    with pytest.raises(ValueError, match="must be symmetric, got an asymmetry of 1"):
        check_positive_definite(STATE, "H", torch.ones(3, 3).triu())
    with pytest.raises(ValueError, match="must be positive definite, got a matrix without a Cholesky factor"):
        check_positive_definite(STATE, "H", torch.diag(torch.tensor([1.0, -1.0])))


def test_a_root_has_an_inverse():
    check_regular(STATE, "T", torch.diag(torch.tensor([1e-9, 1.0, 1e-5], dtype=torch.float64)))
    check_regular(STATE, "T", torch.eye(3).expand(2, 3, 3))
    for root in (torch.zeros(3, 3), torch.ones(3, 3), torch.stack([torch.eye(3), torch.zeros(3, 3)])):
        with pytest.raises(ValueError, match=r"\['T'\] must be a regular matrix, got a singular one"):
            check_regular(STATE, "T", root)


def test_a_ridge_that_is_not_positive_is_refused():
    solver = RLS().bind(nn.Linear(4, 2))
    state = solver.state_dict()
    for factor in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"\['left'\] must be positive"):
            solver.load_state_dict(state | {"left": factor * state["left"]})


def test_a_head_must_be_plain():
    small, sparse = nn.Linear(2, 2), nn.Linear(2, 2)
    small.weight = nn.Parameter(torch.eye(2).to(torch.float8_e4m3fn))
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    for head, error, words in (
        (small, TypeError, r"16 bits or more, got torch\.float8_e4m3fn"),
        (sparse, TypeError, "head must have a dense weight"),
        (nn.LazyLinear(2), ValueError, "LazyLinear"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), ValueError, "parametrization"),
    ):
        with pytest.raises(error, match=words):
            RLS().bind(head)


def test_weights_that_do_not_fit_the_head_are_named():
    head, learned = nn.Linear(2, 1, dtype=torch.float16), torch.full((1, 3), 1e5)
    words = str(explain_nonfinite(torch.ones(1, 2), torch.ones(1, 1), head, learned))
    assert words.startswith("the head's weights must fit into torch.float16, at most 65504, got 100000")


x, y = torch.zeros(3, 4), torch.zeros(3, 2)
SAMPLES = [
    (torch.zeros(3, 5), y, None, ValueError, r"shape \(..., 4\), the head's in_features, got \(3, 5\)"),
    (torch.zeros(()), y, None, ValueError, r"shape \(..., 4\)"),
    (torch.zeros(0, 4), torch.zeros(0, 2), None, ValueError, "at least one sample"),
    (x, torch.zeros(3, 3), None, ValueError, r"targets must have shape \(3, 2\) .* got \(3, 3\)"),
    (x, torch.zeros(2, 2), None, ValueError, r"targets must have 3 rows, as the features, got shape \(2, 2\)"),
    (x, torch.zeros(3), None, ValueError, r"unsqueeze\(-1\)"),
    (x, torch.zeros(3, dtype=torch.long), None, TypeError, r"one_hot\(targets, 2\).float\(\)"),
    (x, y.long(), None, TypeError, r"targets must be floating point, got torch.int64: call targets.float\(\)"),
    (x.long(), y, None, TypeError, "features must be floating point, got torch.int64"),
    (x + 0j, y, None, TypeError, "features must be floating point, got torch.complex64"),
    (x.numpy(), y, None, TypeError, r"features must be a torch.Tensor, got ndarray"),
    (x, y.tolist(), None, TypeError, "targets must be a torch.Tensor, got list"),
    (x, y, torch.ones(2), ValueError, r"sample_weight must have shape \(3,\)"),
    (x, y, torch.tensor([1.0, -1, 1]), ValueError, "sample_weight must be finite and at least 0, got -1"),
    (x, y, torch.tensor([1.0, math.nan, 1]), ValueError, "sample_weight must be finite and at least 0, got nan"),
    (x.to("meta"), y, None, ValueError, "features must be on cpu, where the head is, got meta"),
]


@pytest.mark.parametrize(("features", "targets", "weight", "error", "words"), SAMPLES)
def test_samples_that_do_not_fit_are_named(features, targets, weight, error, words):
    with pytest.raises(error, match=words):
        check_rows(nn.Linear(4, 2), features, targets, weight)


@pytest.mark.parametrize(("features", "targets", "words"), [
    (x * math.nan, y, r"features must be finite, got nan \(12 of 12"),
    (x, y.index_fill(1, torch.tensor([0]), -math.inf), r"targets must be finite, got -inf \(3 of 6"),
    (x.double() + 1e200, y, r"small enough to square, got 1e\+200"),
])  # fmt: skip
def test_numbers_that_cannot_be_learned_are_named_in_every_verb(features, targets, words):
    solver = RLS().bind(nn.Linear(4, 2))
    solver.update(torch.ones(3, 4), y)
    for verb in (solver.update, solver.unlearn):
        with pytest.raises(ValueError, match=words):
            verb(features, targets)
    for part in ("weight", "bias"):
        broken = RLS().bind(nn.Linear(4, 2))
        getattr(broken.linear, part).data.fill_(math.nan)
        with pytest.raises(ValueError, match=f"the head's {part} must be finite, got nan"):
            broken.update(x, y)
