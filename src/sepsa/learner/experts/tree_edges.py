"""The codes of the inputs of trees: edges between values, drawn from quantiles of the rows."""

from __future__ import annotations

from sepsa.compiled.kernels import called
from sepsa.compiled.linear_algebra import fill
from sepsa.learner.experts.tree_parts import BINS, NOWHERE, SAMPLE

CROWD = 16  # if one in so many of the latest values has the same code and they differ, the edges are drawn again


@called
def code_of(edges, value):
    """0 for a missing value, NaN or `NOWHERE`, else 1 and the number of edges below it."""
    if not value < NOWHERE:
        return 0
    low, high = 0, edges.size
    while low < high:
        middle = (low + high) // 2
        if edges[middle] < value:
            low = middle + 1
        else:
            high = middle
    return 1 + low


@called
def merge(edges, counts, latest, values, masses):
    """Sort edges, with the rows of their codes, and the latest values into `values`, each once; returns how many.

    Half of the mass is that of the latest values.
    """
    n, total = 0, 1.0
    for b in range(edges.size):
        if edges[b] < NOWHERE:
            values[n], masses[n] = edges[b], counts[b + 1]
            total += counts[b + 1]
            n += 1
    for i in range(latest.size):
        if latest[i] < NOWHERE:
            values[n], masses[n] = latest[i], 0.5 * total / latest.size
            n += 1
    gap = 364
    while gap > 0:  # Shell's method
        for i in range(gap, n):
            value, mass, at = values[i], masses[i], i
            while at >= gap and values[at - gap] > value:
                values[at], masses[at] = values[at - gap], masses[at - gap]
                at -= gap
            values[at], masses[at] = value, mass
        gap //= 3
    last = 0
    for i in range(1, n):
        if values[i] == values[last]:
            masses[last] += masses[i]
        else:
            last += 1
            values[last], masses[last] = values[i], masses[i]
    return last + 1 if n else 0


@called
def crowded(edges, values, masses, n):
    """Whether a large share of n values in ascending order, and not of a single one, has one code."""
    at, distinct, run, most, total = 0, 0, 0.0, 0.0, 0.0
    for i in range(n):
        while at < edges.size and edges[at] < values[i]:
            at, distinct, run = at + 1, 0, 0.0
        distinct, run, total = distinct + 1, run + masses[i], total + masses[i]
        if distinct > 1:
            most = max(most, run)
    return most * CROWD > total


@called
def select(values, masses, n, edges):
    """edges (BINS - 2,): n values in ascending order if they are as few, else quantiles, and those about heavy ones."""
    total, passed, kept = 0.0, 0.0, 0
    for i in range(n):
        total += masses[i]
    for i in range(n):
        heavy = masses[i] * edges.size >= total
        if n > edges.size and heavy and i > 0 and (kept == 0 or edges[kept - 1] < values[i - 1]) and kept < edges.size:
            edges[kept] = values[i - 1]
            kept += 1
        passed += masses[i]
        if (n <= edges.size or heavy or passed * edges.size >= total * (kept + 1)) and kept < edges.size:
            edges[kept] = values[i]
            kept += 1
    fill(edges[kept:], NOWHERE)


@called
def draw_edges(edges, codes, rows, latest, ever, following, merged):
    """Draw the edges of an input, by quantiles where it has had more values than codes, and its codes by them.

    They are drawn from the first rows, and again where many of the latest values lie together. The latest rows get the
    codes of their values, `ever` - 1 being the number of the last row and `following` - 1 its place; older rows get
    that of the largest value which their former code allows.
    """
    values, masses, counts, filled = merged[0], merged[1], merged[2], min(ever, SAMPLE)
    n = merge(edges[:0], counts, latest[:filled], values, masses)
    if ever > SAMPLE:
        if not crowded(edges, values, masses, n):
            return
        fill(counts[:BINS], 0.0)
        for i in range(rows):
            counts[codes[i]] += 1.0
        n = merge(edges, counts, latest[:filled], values, masses)
    for b in range(1, BINS):  # the largest value of each code, then its new code
        counts[b] = min(edges[b - 1] if b < BINS - 1 else NOWHERE, values[n - 1]) if n else 0.0
    select(values, masses, n, edges)
    for b in range(1, BINS):
        counts[b] = code_of(edges, counts[b])
    counts[0] = 0.0
    if ever > SAMPLE:
        for i in range(rows):
            codes[i] = int(counts[codes[i]])
    for j in range(min(filled, rows)):
        codes[(following - 1 - j) % codes.size] = code_of(edges, latest[(ever - 1 - j) % SAMPLE])
