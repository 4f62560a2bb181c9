"""What the checks of saved states return, and the words in which they refuse."""

import math

import numpy as np
import pytest
import torch

from sepsa.states.plain import pack_label, unpack_labels
from sepsa.states.schema import Entries, read, settings
from sepsa.states.tree import not_finite

DOUBLE = torch.ones(2, 3, dtype=torch.float64)
NAN = np.array([1.0, math.nan])


def entry(value):
    return Entries("state_dict", {"n": value})


@pytest.mark.parametrize("value", [0, 3, 2.5, 1e300, np.float32(1.5)])
def test_numbers_in_range_are_returned(value):
    assert entry(value).number("n", 0) == value
    assert type(entry(value).number("n", 0)) is float
    assert type(entry(np.int64(3)).integer("n")) is int


def test_tensors_and_arrays_are_copied_into_one_layout_and_device():
    given = torch.randn(3, 2).T
    copy = entry(given).tensor("n", (2, 3), torch.float32)
    assert copy.is_contiguous()
    assert torch.equal(copy, given)
    copy.zero_()
    assert given.abs().max() > 0
    assert entry(given).tensor("n", (2, None), torch.float32, torch.device("meta")).is_meta
    copied = entry(NAN).array("n", (None,))
    copied[:] = 0
    assert NAN[0] == 1
    assert read("state_dict", {"a": 1}, {"a"})["a"] == 1
    assert entry([{"a": [1]}]).items("n", 1).entries(0, {"a"}).items("a").number(0) == 1
    entry(3).equal("n", 3)


def number(value, **bounds):
    return lambda: entry(value).number("n", **bounds)


def integer(value, *bounds):
    return lambda: entry(value).integer("n", *bounds)


def tensor(value):
    return lambda: entry(value).tensor("n", (2, 3), torch.float64)


def array(value):
    return lambda: entry(value).array("n", (2,))


REFUSED = [
    (number(-1, low=0), r"state_dict\['n'\] must be a number of at least 0, got -1: the checkpoint is damaged"),
    (number(True, low=0), "got True"),
    (number("3", low=0), "got '3'"),
    (number(None), "must be a finite number, got None"),
    (number(math.nan), "must be a finite number, got nan"),
    (number(math.inf, low=0), "got inf"),
    (number(10**400, low=0), "got int"),
    (number(7, low=0, high=5), r"must be a number in \[0, 5\], got 7"),
    (integer(2.0), "must be an integer of at least 0, got 2.0"),
    (integer(True), "got True"),
    (integer(7, 0, 5), r"an integer in \[0, 5\], got 7"),
    (integer(10**30), "must be an integer of at least 0, got 1000"),
    (tensor(DOUBLE.float()), r"must be a tensor of torch\.float64 in dense layout, got a tensor of torch\.float32"),
    (tensor(DOUBLE.to_sparse()), "in dense layout, got .* layout torch.sparse_coo"),
    (tensor(DOUBLE.to("meta")), "got a tensor of .* on meta"),
    (tensor(torch.ones(3, 2)), r"must be a tensor of shape \(2, 3\), got \(3, 2\): .* a model of another size"),
    (tensor(np.ones((2, 3))), r"must be a tensor of shape \(2, 3\), got an array of float64"),
    (tensor(None), r"must be a tensor of shape \(2, 3\), got NoneType"),
    (tensor(DOUBLE * math.inf), "must be finite, got inf: the checkpoint is damaged"),
    (array(np.array([1, 2])), "must be an array of float64 in dense layout, got an array of int64"),
    (array(np.ones(3)), r"must be an array of shape \(2,\), got \(3,\)"),
    (array(np.ones((2, 2))), r"must be an array of shape \(2,\), got \(2, 2\)"),
    (array(torch.ones(2)), r"must be an array of shape \(2,\), got a tensor"),
    (lambda: read("state_dict", [], {"a"}, "RLS"), "state_dict must be a dict, got list"),
    (lambda: read("state_dict", {1: 2}, {"a"}, "RLS"), r"than RLS saves: missing \['a'\], unexpected \['1'\]"),
    (
        lambda: entry([{"a": [1, "2"]}]).items("n", 1).entries(0, {"a"}).items("a").number(1),
        r"state_dict\['n'\]\[0\]\['a'\]\[1\] must be a finite number, got '2'",
    ),
    (lambda: entry([1]).items("n", 2), "must be a list of 2 items, got 1 items"),
    (lambda: entry(3).items("n"), "must be a list, got int"),
    *(
        (lambda value=value: entry(value).equal("n", 3), r"\['n'\] must be 3, as this object was made, got")
        for value in (3.0, True, np.ones(2), torch.ones(2))
    ),
]


@pytest.mark.parametrize(("check", "words"), REFUSED, ids=range(len(REFUSED)))
def test_other_values_are_refused(check, words):
    with pytest.raises(ValueError, match=words):
        check()


def test_an_error_of_a_setting_becomes_one_of_the_state():
    with (
        pytest.raises(ValueError, match="state_dict: forgetting is wrong: the checkpoint is damaged"),
        settings("state_dict"),
    ):
        raise TypeError("forgetting is wrong")


def test_arrays_of_numbers_alone_can_have_what_is_not_finite():
    state = {"a": NAN, "b": [torch.tensor(math.inf), np.arange(3)], "c": np.array(["text", "nan"])}
    assert list(not_finite(state)) == ["state['a']", "state['b'][0]"]


def test_labels_keep_their_positions():
    labels = ["a", 1, (2, None)]
    assert unpack_labels(entry([*map(pack_label, labels)]), "n") == {"a": 0, 1: 1, (2, None): 2}
