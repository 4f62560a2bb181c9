"""A table of parts: kernels see what Python wrote, and saving, checking, growth and units follow the declaration."""

import contextlib

import numpy as np
import pytest

from plain_kernels import plain_kernels
from sepsa.compiled import code
from sepsa.compiled.kernels import CALL, kernel
from sepsa.learner.memory.memory import Layout, Memory
from sepsa.learner.memory.parts import Field, Part, Record, Rule, work
from sepsa.learner.memory.views import Frame, Group

frame = Frame("test", ("inputs", "rows"), Part("X", float, ("rows", "inputs")))
size = frame.size
means = Group(
    frame,
    "means",
    Part("MEAN", float, ("inputs",), start=0.5, unit=("inputs", 1)),
    Part("LAST", np.float32, ("ring", "inputs")),
    Part("CODES", np.int8, ("inputs",), bounds=(-1, 100)),
    Part("SHARES", np.float32, ("inputs",), start=lambda sizes: np.arange(sizes["inputs"])),
    Part("FILLED", Record(rows=Field(int, bounds=(0, "ring")), next=Field(int, bounds=(0, "ring - 1")))),
    Part(
        "NUMBERS",
        Record(total=Field(float, unit=("inputs", -1)), count=Field(int, start=1, restarts=True)),
    ),
    work("OFF", float, ("inputs",)),
    sizes={"ring": lambda sizes: 12 // sizes["inputs"]},
    rings={"ring": "FILLED"},
    rules=(Rule("MEAN", "below all shares", lambda part: bool((part("MEAN") < 10 + part("SHARES")).all())),),
)
pairs = Group(
    frame, "pairs", Part("P", float, ("own",)), Part("Q", float, ("own",)), sizes={"own": None}, repeated=True
)


@kernel
def learn(model, n):
    """Learn n rows: the mean of each input, the last rows, sums over the copies of `pairs`."""
    mean, last = means.views("MEAN LAST", model)
    filled, numbers = means.FILLED(model), means.NUMBERS(model)
    off, shares = means.OFF(model), means.SHARES(model)
    for i in range(n):
        for j in range(mean.size):
            off[j] = frame.X(model)[i, j] - mean[j]
            mean[j] += off[j] / numbers.count
            last[filled.next, j] = frame.X(model)[i, j]
            shares[j] += 1.0
            numbers.total += off[j]
        numbers.count += 1
        filled.rows, filled.next = min(filled.rows + 1, size.ring(model)), (filled.next + 1) % size.ring(model)
        for copy in range(2):
            for k in range(pairs.own(model, copy)):
                one, other = pairs.views("P Q", model, copy)
                one[k] += copy + k
                other[k] -= pairs.P(model, copy)[k]
    return numbers.count


def memory(inputs):
    layout = Layout(frame, (means, pairs), {"inputs": inputs, "rows": 1}, {"pairs": [{"own": 2}, {"own": 3}]})
    made = Memory(layout)
    made.start()
    return made


def learned(made, X):
    X = np.ascontiguousarray(X, float)
    workspace = np.zeros(made.layout.workspace)
    slots = [array.ctypes.data for array in (workspace, made.vector, made.layout.numbers, X)]
    workspace[: len(slots)].view(np.int64)[:] = slots
    made.layout.numbers[frame.positions["rows"]] = len(X)
    return CALL(code.address(learn))(workspace.ctypes.data, len(X))


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(8, 2))


@pytest.mark.parametrize("run", [contextlib.nullcontext, plain_kernels], ids=["compiled", "plain"])
def test_a_kernel_sees_arrays_records_and_copies(rows, run):
    made = memory(2)
    with run():
        assert learned(made, rows) == 9
    assert np.allclose(made("MEAN", "means"), rows.mean(0))
    assert made("FILLED", "means").item() == (6, 2)
    assert np.allclose(made("LAST", "means")[[2, 3, 4, 5, 0, 1]], rows[2:])
    assert made("SHARES", "means").dtype == np.float32
    assert made("SHARES", "means").tolist() == [8.0, 9.0]
    assert made("P", "pairs", 1).tolist() == [8.0, 16.0, 24.0]
    assert made("Q", "pairs", 1).tolist() == [-36.0, -72.0, -108.0]


def test_a_saved_state_loads_and_a_record_is_a_vector(rows):
    made, other = memory(2), memory(2)
    learned(made, rows)
    state = made.save("means")
    assert state["FILLED"].dtype == np.int64
    assert state["NUMBERS"].dtype == np.float64
    other.load(state, "state", "means")
    for name in made.names("means"):
        assert np.array_equal(other(name, "means"), made(name, "means"))


DAMAGES = {
    "above a size": ("FILLED", np.array([7, 0]), r"state\['FILLED'\] must be within \(0, 'ring'\), got .*7"),
    "a size less 1": ("FILLED", np.array([1, 6]), r"within \(0, 'ring - 1'\), got .*6"),
    "an array's bound": ("CODES", np.array([-2, 0], np.int8), r"within \(-1, 100\), got array\(\[-2,  0\]"),
    "a dtype": ("LAST", np.zeros((6, 2)), r"\['LAST'\] must be an array of float32"),
    "a rule": ("MEAN", np.array([0.0, 1e9]), r"\['MEAN'\] must be below all shares"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bounds_and_rules_are_checked(damage, rows):
    (name, value, words), made = DAMAGES[damage], memory(2)
    learned(made, rows)
    made("CODES", "means")[:] = 1
    state = made.save("means") | {name: value}
    with pytest.raises(ValueError, match=words):
        memory(2).load(state, "state", "means")


def test_growth_keeps_the_latest_rows_in_order_and_starts_what_is_new(rows):
    made, other = memory(2), memory(3)
    learned(made, rows)
    other.grow(made)
    assert np.allclose(other("LAST", "means")[:, :2], rows[4:])
    assert other("FILLED", "means").item() == (4, 0)
    assert other("NUMBERS", "means").item() == (made("NUMBERS", "means")["total"], 1)
    assert other("MEAN", "means").tolist() == [*made("MEAN", "means"), 0.5]
    assert other("SHARES", "means").tolist() == [8.0, 9.0, 2.0]
    assert np.array_equal(other("P", "pairs", 1), made("P", "pairs", 1))


def test_what_is_in_a_unit_is_divided(rows):
    made = memory(2)
    learned(made, rows)
    mean, total = made("MEAN", "means").copy(), made("NUMBERS", "means")["total"].item()
    made.divide("inputs", 4.0)
    assert made("MEAN", "means").tolist() == (mean / 4).tolist()
    assert made("NUMBERS", "means")["total"] == total * 4
