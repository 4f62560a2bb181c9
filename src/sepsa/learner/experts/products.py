"""Squares and products of two inputs as features of a recursive-least-squares head.

Where there are more than `PAIRED` inputs, those by which the trees gain most are chosen. Once another one gains much
more, it takes the place of the one that gains least: the features of that one leave the head, which keeps what it knows
of the others (their marginal distribution), and those of the new one start at their prior.
"""

from __future__ import annotations

import numpy as np

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import add_scaled, fill, multiply
from sepsa.learner.arithmetic.head import rank_one
from sepsa.learner.experts import trees
from sepsa.learner.experts.frame import Expert, clipped, given, row
from sepsa.learner.experts.tree_growth import best_besides
from sepsa.learner.memory.parts import Part, Sizes, work
from sepsa.learner.memory.views import Group

PAIRED = 10  # inputs of which products are taken
RIDGE = 10.0
FARTHEST = 1e6  # deviations of the targets, to which an answer is clipped


def features(sizes: Sizes) -> int:
    """The number of features."""
    paired = min(sizes["inputs"], PAIRED)
    return 1 + paired * (paired + 3) // 2


parts = Group(
    given,
    "products",
    Part("PAIRS", np.int64, ("paired",), start=lambda sizes: np.arange(sizes["paired"]), bounds=(0, "inputs - 1")),
    Part("W", float, ("outputs", "products")),
    Part("U", float, ("product_triangle",)),
    Part("D", float, ("products",), start=1 / RIDGE),
    work("PHI", float, ("products",)),
    work("B", float, ("products",)),
    sizes={
        "paired": lambda sizes: min(sizes["inputs"], PAIRED),
        "products": features,
        "product_triangle": lambda sizes: features(sizes) * (features(sizes) - 1) // 2,
    },
)


@called
def expand(z, pairs, phi):
    """φ = [1, z_0, z_0², z_1, z_1 z_0, z_1², …] of these inputs; a further input adds features at the end."""
    phi[0] = 1.0
    at = 1
    for j in range(pairs.size):
        phi[at] = z[pairs[j]]
        for i in range(j + 1):
            phi[at + 1 + i] = z[pairs[j]] * z[pairs[i]]
        at += j + 2


@called
def forget(U, D, f, variance, b):
    """Replace feature f by one that is independent of all others, with this variance, in B = UDUᵀ; b is a workspace.

    The others keep their covariances: what column f gives to those before it is added to their part of UDUᵀ by Agee's
    and Turner's method.
    """
    first = f * (f - 1) // 2
    for i in range(f):
        b[i], U[first + i] = U[first + i], 0.0
    for j in range(f + 1, D.size):
        U[j * (j - 1) // 2 + f] = 0.0
    share, D[f] = D[f], variance
    for j in range(f - 1, -1, -1):
        s, before, column = b[j], D[j], U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        D[j] += share * s * s
        step = share * s / D[j]
        share *= before / D[j]
        for i in range(j):
            b[i] -= s * column[i]
            column[i] += step * b[i]


@called
def replace_input(model, place, new):
    """Let another input take this place."""
    U, D, W, b, pairs = parts.views("U D W B PAIRS", model)
    pairs[place] = new
    for j in range(place, pairs.size):
        start = 1 + j * (j + 3) // 2
        first, stop = (start, start + j + 2) if j == place else (start + 1 + place, start + 2 + place)
        for f in range(first, stop):
            forget(U, D, f, 1.0 / RIDGE, b)
            fill(W[:, f], 0.0)


@called
def choose(model):
    """Replace the input by which the trees gain least, if another one gains more than twice as much."""
    gains, pairs, worst = trees.parts.GAINS(model), parts.PAIRS(model), 0
    for j in range(pairs.size):
        if gains[pairs[j]] < gains[pairs[worst]]:
            worst = j
    best = best_besides(gains, pairs)
    if best >= 0 and gains[best] > 2.0 * gains[pairs[worst]]:
        replace_input(model, worst, best)


@kernel
@called
def answer(model, e):
    (pairs, W, phi), out = parts.views("PAIRS W PHI", model), row.ANSWERS(model)[e]
    expand(row.Z(model), pairs, phi)
    multiply(W, phi, out)
    for k in range(out.size):
        out[k] = clipped(out[k], FARTHEST)
    return 0


@kernel
def learn(model, e):
    y, out, trust = row.Y(model), row.ANSWERS(model)[e], row.FACTS(model).trust
    U, D, W, phi, b = parts.views("U D W PHI B", model)
    if trees.parts.STORED(model).ever % 64 == 0:
        choose(model)
    answer(model, e)  # an input may be another one, or have got its scale since the answer
    g = rank_one(U, D, phi, 0, trust, b)
    for k in range(y.size):
        add_scaled(b, trust * (y[k] - out[k]) / g, W[k])
    return 0


EXPERT = Expert(parts, answer, learn)
