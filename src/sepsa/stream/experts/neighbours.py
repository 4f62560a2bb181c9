"""Nearest neighbours in the window of the last rows, by a distance in which every input has the same range."""

from __future__ import annotations

import numpy as np

from sepsa.stream.experts.compilation import called

NEIGHBOURS = 12


@called
def neighbours(X, Y, weights, rows, z, low, high, distances, nearest, places, out):
    """out (m,): the mean target of the window rows nearest to z (d,), `NEIGHBOURS` of them.

    X (d, window) holds the inputs of the window, Y (window, m) its targets; `rows` of them are filled. A neighbour of
    weight ω at distance r counts ω/(r² + s), where s is a sixteenth of the mean r² of the neighbours.
    """
    for i in range(rows):
        distances[i] = 0.0
    for j in range(z.size):
        width = high[j] - low[j]
        if width > 0.0:
            column, value, gain = X[j], X.dtype.type(z[j]), X.dtype.type(1.0 / (width * width))
            for i in range(rows):
                off = column[i] - value
                distances[i] += gain * off * off
    found = min(NEIGHBOURS, rows)
    for k in range(NEIGHBOURS):
        nearest[k] = np.inf
    for i in range(rows):
        if distances[i] < nearest[found - 1]:
            at = found - 1
            while at > 0 and distances[i] < nearest[at - 1]:
                nearest[at], places[at] = nearest[at - 1], places[at - 1]
                at -= 1
            nearest[at], places[at] = distances[i], i
    softening, total = 1e-12, 1e-300
    for i in range(found):
        softening += nearest[i] / (16.0 * found)
    for k in range(out.size):
        out[k] = 0.0
    for i in range(found):
        weight = weights[int(places[i])] / (nearest[i] + softening)
        total += weight
        for k in range(out.size):
            out[k] += weight * Y[int(places[i]), k]
    for k in range(out.size):
        out[k] /= total
