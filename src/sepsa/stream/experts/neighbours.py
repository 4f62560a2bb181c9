"""Nearest neighbours in the window of the last rows, by a distance in which every input has the same range."""

from __future__ import annotations

import numpy as np

from sepsa.stream.experts.compilation import called

NEIGHBOURS = 12
LANES = 16


@called
def upper_bound(distances, lanes):
    """A number that `NEIGHBOURS` of the distances do not exceed, and few more: infinite where there are fewer.

    The distances are dealt out to lanes (LANES,), whose minima the processor finds side by side. As many distances as
    lanes lie below a minimum of rank `NEIGHBOURS`.
    """
    for k in range(LANES):
        lanes[k] = np.inf
    whole = distances.size - distances.size % LANES
    for start in range(0, whole, LANES):
        for k in range(LANES):
            lanes[k] = distances[start + k] if distances[start + k] < lanes[k] else lanes[k]
    for i in range(whole, distances.size):
        lanes[i - whole] = min(lanes[i - whole], distances[i])
    bound = -lanes.dtype.type(1.0)
    for k in range(LANES):
        below = 0
        for other in range(LANES):
            below += lanes[other] < lanes[k]
        if below < NEIGHBOURS:
            bound = max(bound, lanes[k])
    return bound


@called
def neighbours(X, Y, weights, rows, z, low, high, distances, lanes, nearest, places, out):
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
    found, bound = min(NEIGHBOURS, rows), upper_bound(distances[:rows], lanes)
    for k in range(NEIGHBOURS):
        nearest[k] = np.inf
    for i in range(rows):
        if distances[i] <= bound and distances[i] < nearest[found - 1]:
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
