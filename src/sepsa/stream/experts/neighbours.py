"""Nearest neighbours in the window of the last rows, by a distance in which every input has the same range."""

from __future__ import annotations

import numpy as np

from sepsa.stream.experts.compilation import called

NEIGHBOURS = 12
LANES, TOPS = 64, 8  # of the selection: columns of distances, and of their minima
PLACES = 1024  # a power of two, at least the rows of the window
NONE = np.int32(2**31 - 1)


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
def neighbours(X, Y, weights, rows, z, low, high, distances, integers, out):
    """out (m,): the mean target of the window rows nearest to z (d,), `NEIGHBOURS` of them.

    X (d, window) holds the inputs of the window, Y (window, m) its targets; `rows` of them are filled. A neighbour of
    weight ω at distance r counts ω/(r² + s), where s is a sixteenth of the mean r² of the neighbours. `distances`
    (window,) and `integers` are workspaces.
    """
    for i in range(rows):
        distances[i] = 0.0
    for j in range(z.size):
        width = high[j] - low[j]
        if width > 0.0:
            column, gain = X[j], X.dtype.type(1.0 / width)
            value = gain * X.dtype.type(z[j])
            for i in range(rows):
                off = gain * column[i] - value
                distances[i] += off * off
    padded, found = (rows + LANES - 1) // LANES * LANES, min(NEIGHBOURS, rows)
    lanes, tops = integers[:LANES], integers[LANES : LANES + TOPS]
    places, keys = integers[LANES + TOPS : LANES + TOPS + found], integers[LANES + TOPS + NEIGHBOURS :]
    nearest(distances, rows, keys[:padded], lanes, tops, places)
    softening, total = 1e-12, 1e-300
    for i in range(found):
        softening += distances[places[i]] / (16.0 * found)
    for k in range(out.size):
        out[k] = 0.0
    for i in range(found):
        weight = weights[places[i]] / (distances[places[i]] + softening)
        total += weight
        for k in range(out.size):
            out[k] += weight * Y[places[i], k]
    for k in range(out.size):
        out[k] /= total
