"""Nearest neighbours in the window of the last rows, by a distance in which every input has the same range."""

from __future__ import annotations

import numpy as np

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.views import Group, Views, size
from sepsa.stream.experts.expert import Expert, row

NEIGHBOURS = 12
LANES, TOPS = 64, 8  # of the selection: columns of distances, and of their minima
PLACES = 1024  # a power of two, at least the rows of the window
NONE = np.int32(2**31 - 1)
SOFTENING = 16.0  # the mean squared distance of the neighbours over what is added to each of them
CELLS = 256 * PLACES  # of the window at most: it is shorter where there are more than 256 inputs
LEAST_ROWS = 64


def window_rows(inputs: int, outputs: int) -> int:
    """The rows of the window."""
    return max(LEAST_ROWS, min(PLACES, CELLS // inputs))


# The window: inputs, targets and weights of its rows; how many there are, and the place of the
# next; the range of each input, and 1 for an input that has had two values at most.
PARTS = {
    "ROWS": (np.float32, ("inputs", "window")),
    "TARGETS": (np.float32, ("window", "outputs")),
    "WEIGHTS": (np.float32, ("window",)),
    "FILLED": (np.int64, (2,)),
    "LOW": (float, ("inputs",)),
    "HIGH": (float, ("inputs",)),
    "BINARY": (float, ("inputs",)),
}
WORK = {
    "DISTANCES": (np.float32, ("window",)),
    "LANES": (np.int32, (LANES,)),
    "TOPS": (np.int32, (TOPS,)),
    "FOUND": (np.int32, (NEIGHBOURS,)),
    "KEYS": (np.int32, ("keys",)),
}
GROUP = Group("neighbours", PARTS, WORK, {"window": window_rows, "keys": lambda d, m: window_rows(d, m) + LANES})
window, work = Views(GROUP, "state", PARTS), Views(GROUP, "workspace", WORK)


@called
def minima(cells, out):
    """out (columns,): the least number of each column of cells (rows, columns)."""
    for k in range(out.size):
        out[k] = NONE
    for r in range(cells.shape[0]):
        for k in range(out.size):
            out[k] = min(out[k], cells[r, k])


@called
def least(cells, column):
    """The least number of one column of cells (rows, columns)."""
    low = NONE
    for r in range(cells.shape[0]):
        low = min(low, cells[r, column])
    return low


@called
def nearest(distances, rows, keys, lanes, tops, places):
    """places (k,): those of the least distances, in order; without branches, which a processor would mispredict.

    A key is a distance, whose bits have the order of the number, with its place in the last bits. Minima of columns of
    keys, and minima of those minima, are corrected after each key that is taken.
    """
    cells = keys.reshape(keys.size // LANES, LANES)
    bits = distances.view(np.int32)
    for i in range(rows):
        keys[i] = (bits[i] & np.int32(-PLACES)) | np.int32(i)
    for i in range(rows, keys.size):
        keys[i] = NONE
    minima(cells, lanes)
    groups = lanes.reshape(LANES // TOPS, TOPS)
    minima(groups, tops)
    for k in range(places.size):
        low = tops[0]
        for top in range(TOPS):
            low = min(low, tops[top])
        at = low & (PLACES - 1)
        places[k], keys[at] = at, NONE
        lanes[at % LANES] = least(cells, at % LANES)
        tops[at % TOPS] = least(groups, at % TOPS)


@called
def gain_of(low, high):
    """The factor of an input of this range in differences; 0 where it is constant."""
    return np.float32(1.0 / (high - low) if low < high else 0.0)


@called
def neighbours(X, Y, weights, rows, z, low, high, distances, lanes, tops, places, keys, out):
    """out (m,): the mean target of the window rows nearest to z (d,), `NEIGHBOURS` of them.

    X (d, window) holds the inputs of the window, Y (window, m) its targets; `rows` of them are filled. A neighbour of
    weight ω at distance r counts ω/(r² + s), where s is a sixteenth of the mean r² of the neighbours. `distances`
    (window,), `lanes`, `tops`, `places` and `keys` are workspaces.
    """
    for i in range(rows):
        distances[i] = 0.0
    for j in range(0, z.size, 2):  # by two, for half as many passes; the last may have itself, at no gain, beside it
        other = min(j + 1, z.size - 1)
        a, gain_a = X[j], gain_of(low[j], high[j])
        b, gain_b = X[other], gain_of(low[other], high[other]) if other > j else np.float32(0.0)
        value_a, value_b = gain_a * np.float32(z[j]), gain_b * np.float32(z[other])
        for i in range(rows):
            off_a, off_b = gain_a * a[i] - value_a, gain_b * b[i] - value_b
            distances[i] += off_a * off_a + off_b * off_b
    padded, found = (rows + LANES - 1) // LANES * LANES, min(NEIGHBOURS, rows)
    nearest(distances, rows, keys[:padded], lanes, tops, places[:found])
    softening, total = 1e-12, 1e-300
    for i in range(found):
        softening += distances[places[i]] / (SOFTENING * found)
    for k in range(out.size):
        out[k] = 0.0
    for i in range(found):
        weight = weights[places[i]] / (distances[places[i]] + softening)
        total += weight
        for k in range(out.size):
            out[k] += weight * Y[places[i], k]
    for k in range(out.size):
        out[k] /= total


@kernel(cost=2.0)
def answer(model, e):
    neighbours(
        window.ROWS(model), window.TARGETS(model), window.WEIGHTS(model), window.FILLED(model)[0], row.Z(model),
        window.LOW(model), window.HIGH(model), work.DISTANCES(model), work.LANES(model), work.TOPS(model),
        work.FOUND(model), work.KEYS(model), row.ANSWERS(model)[e],
    )  # fmt: skip
    return 0


@kernel(cost=0.8)
def learn(model, e):
    """Put the row into the window, in the place of the oldest once it is full."""
    z, y, filled, n = row.Z(model), row.Y(model), window.FILLED(model), size.window(model)
    X, Y, low, high, binary = (
        window.ROWS(model), window.TARGETS(model), window.LOW(model), window.HIGH(model), window.BINARY(model)
    )  # fmt: skip
    at, first = filled[1], filled[0] == 0
    for j in range(z.size):
        X[j, at] = z[j]
        if low[j] < high[j] and z[j] != low[j] and z[j] != high[j]:
            binary[j] = 0.0
        low[j], high[j] = z[j] if first else min(low[j], z[j]), z[j] if first else max(high[j], z[j])
    for k in range(y.size):
        Y[at, k] = y[k]
    window.WEIGHTS(model)[at] = row.SHARE(model)[0]
    filled[0], filled[1] = min(filled[0] + 1, n), (at + 1) % n
    return 0


def start(part, inputs, outputs):
    part("BINARY")[inputs:] = 1.0


def wrong(part):
    rows, following = part("FILLED")
    window = part("WEIGHTS").size
    fits = 0 <= rows <= window and 0 <= following < window
    return None if fits else ("FILLED", f"two places among {window} rows")


EXPERT = Expert(GROUP, answer, learn, start, wrong)
