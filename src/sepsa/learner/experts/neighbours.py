"""Nearest neighbours in the window of the last rows, by a distance in which every input has the same range."""

from __future__ import annotations

import numpy as np

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import add_scaled, copy, fill
from sepsa.learner.experts.frame import Expert, given, row, size
from sepsa.learner.memory.parts import Field, Part, Record, Sizes, work
from sepsa.learner.memory.views import Group

NEIGHBOURS = 12
LANES, TOPS = 64, 8  # of the selection: columns of distances, and of their minima
PLACES = 1024  # a power of two, at least the rows of the window
NONE = np.int32(2**31 - 1)


def window_rows(sizes: Sizes) -> int:
    """The rows of the window, which is shorter where there are more than 256 inputs."""
    return max(64, min(PLACES, 256 * PLACES // sizes["inputs"]))


window = Group(
    given,
    "neighbours",
    Part("ROWS", np.float32, ("inputs", "window")),
    Part("TARGETS", np.float32, ("window", "outputs")),
    Part("WEIGHTS", np.float32, ("window",)),
    Part("FILLED", Record(rows=Field(int, bounds=(0, "window")), next=Field(int, bounds=(0, "window - 1")))),
    Part("LOW", float, ("inputs",)),
    Part("HIGH", float, ("inputs",)),
    Part("BINARY", float, ("inputs",), start=1.0),  # 1 for an input that has had two values at most
    work("DISTANCES", np.float32, ("window",)),
    work("LANES", np.int32, (LANES,)),
    work("TOPS", np.int32, (TOPS,)),
    work("FOUND", np.int32, (NEIGHBOURS,)),
    work("KEYS", np.int32, ("keys",)),
    sizes={"window": window_rows, "keys": lambda sizes: window_rows(sizes) + LANES},
    rings={"window": "FILLED"},
)


@called
def minima(cells, out):
    """out (columns,): the least number of each column of cells (rows x columns,)."""
    fill(out, NONE)
    for first in range(0, cells.size, out.size):
        for k in range(out.size):
            out[k] = min(out[k], cells[first + k])


@called
def gain_of(low, high):
    """The factor of an input of this range in differences; 0 where it is constant."""
    return np.float32(1.0 / (high - low) if low < high else 0.0)


@called
def measure(model):
    """Fill the squared distances of the rows of the window to the row, each input in units of its range."""
    X, low, high, distances = window.views("ROWS LOW HIGH DISTANCES", model)
    z, rows = row.Z(model), window.FILLED(model).rows
    fill(distances[:rows], 0.0)
    for j in range(0, z.size, 2):  # by two, for half as many passes; the last may have itself, at no gain, beside it
        other = min(j + 1, z.size - 1)
        a, gain_a = X[j], gain_of(low[j], high[j])
        b, gain_b = X[other], gain_of(low[other], high[other]) if other > j else np.float32(0.0)
        value_a, value_b = gain_a * np.float32(z[j]), gain_b * np.float32(z[other])
        for i in range(rows):
            off_a, off_b = gain_a * a[i] - value_a, gain_b * b[i] - value_b
            distances[i] += off_a * off_a + off_b * off_b


@called
def find_nearest(model, found):
    """Fill the places of the rows of the least distances, in order; no branch that a processor would mispredict.

    A key is a distance, whose bits have the order of the number, with its place in the last bits. Minima of columns of
    keys, and minima of those minima, are corrected after each key that is taken.
    """
    distances, keys, lanes, tops, places = window.views("DISTANCES KEYS LANES TOPS FOUND", model)
    rows, bits = window.FILLED(model).rows, distances.view(np.int32)
    keys = keys[: (rows + LANES - 1) // LANES * LANES]
    for i in range(rows):
        keys[i] = (bits[i] & np.int32(-PLACES)) | np.int32(i)
    fill(keys[rows:], NONE)
    minima(keys, lanes)
    minima(lanes, tops)
    for k in range(found):
        low = tops[0]
        for top in range(TOPS):
            low = min(low, tops[top])
        at = low & (PLACES - 1)
        lane, top = at % LANES, at % TOPS
        places[k], keys[at] = at, NONE
        minima(keys[lane::LANES], lanes[lane : lane + 1])
        minima(lanes[top::TOPS], tops[top : top + 1])


@kernel
def answer(model, e):
    """Answer by the mean target of the `NEIGHBOURS` nearest rows of the window.

    One of weight ω at distance r counts ω/(r² + s), where s is a sixteenth of the mean r² of the neighbours.
    """
    Y, weights, distances, places = window.views("TARGETS WEIGHTS DISTANCES FOUND", model)
    out, found = row.ANSWERS(model)[e], min(NEIGHBOURS, window.FILLED(model).rows)
    measure(model)
    find_nearest(model, found)
    softening, total = 1e-12, 1e-300
    for i in range(found):
        softening += distances[places[i]] / (16.0 * found)
    fill(out, 0.0)
    for i in range(found):
        weight = weights[places[i]] / (distances[places[i]] + softening)
        total += weight
        add_scaled(Y[places[i]], weight, out)
    for k in range(out.size):
        out[k] /= total
    return 0


@kernel
def learn(model, e):
    """Put the row into the window, in the place of the oldest once it is full."""
    z, y = row.views("Z Y", model)
    filled, X, Y, low, high, binary = window.views("FILLED ROWS TARGETS LOW HIGH BINARY", model)
    at, first, places = filled.next, filled.rows == 0, size.window(model)
    for j in range(z.size):
        X[j, at] = z[j]
        if low[j] < high[j] and z[j] != low[j] and z[j] != high[j]:
            binary[j] = 0.0
        low[j], high[j] = z[j] if first else min(low[j], z[j]), z[j] if first else max(high[j], z[j])
    copy(y, Y[at])
    window.WEIGHTS(model)[at] = row.FACTS(model).share
    filled.rows, filled.next = min(filled.rows + 1, places), (at + 1) % places
    return 0


EXPERT = Expert(window, answer, learn)
