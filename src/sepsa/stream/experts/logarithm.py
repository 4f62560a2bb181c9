"""Experts for a single positive target that multiplies: products and trees that predict its logarithm.

They answer for t = log((y + s)/(a + s)), where a is the level of the first targets and s a twentieth of it, so that a
zero is no harm. Features, curvature and splits are those of `products` and `trees`, to which t is one more target; the
answer is c(a + s)eᵗ - s, where c is the least-squares factor between such answers and the targets of recent rows. Where
the first targets are not positive, and from the first negative target on, they answer as the network does.
"""

from __future__ import annotations

import math

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.views import Group, Views
from sepsa.stream.experts import products, trees
from sepsa.stream.experts.expert import Expert, row

SHIFT = 0.05  # s/a
FORGETTING = 0.998
PRIOR = 20.0  # rows at which the factor c is 1
BEYOND = 0.5  # the largest t in an answer, above that of all rows

# ORIGIN is a + s, 0 where the experts are silent. HIGHEST is the largest t of all rows.
PRODUCTS_PARTS = {
    "ORIGIN": (float, (1,)),
    "HIGHEST": (float, (1,)),
    "FACTOR": (float, (2,)),
}
PRODUCTS = Group("log products", PRODUCTS_PARTS, {}, {})
TREES_PARTS = {"FACTOR": (float, (2,))}
TREES = Group("log trees", TREES_PARTS, {}, {})
parts, of_trees = Views(PRODUCTS, "state", PRODUCTS_PARTS), Views(TREES, "state", TREES_PARTS)


@called
def take_logarithm(model, target, y, unit):
    """Fill the row's t by its target, bounded as y in units, and whether there is one."""
    origin, log = parts.ORIGIN(model), row.LOG(model)
    lowest = origin[0] * SHIFT / (1.0 + SHIFT)
    if target + origin[0] < lowest * (1.0 - 1e-9):
        origin[0] = 0.0
    log[1] = origin[0]
    if origin[0] > 0.0:
        log[0] = math.log(max((y / unit if unit > 0.0 else target) + origin[0], lowest) / origin[0])
        parts.HIGHEST(model)[0] = max(parts.HIGHEST(model)[0], log[0])


@called
def tell(model, e, t, factor, unit):
    """Answer by a prediction of t."""
    origin, answers = parts.ORIGIN(model)[0], row.ANSWERS(model)
    answers[e, 0] = answers[0, 0]
    if origin > 0.0:
        level = math.exp(min(t, parts.HIGHEST(model)[0] + BEYOND))
        answers[e, 0] = origin * (level * factor[0] / factor[1] - 1.0) * unit


@called
def follow(model, t, factor):
    """Add the row to the sums of which the factor is the ratio."""
    share, log, level = row.SHARE(model)[0], row.LOG(model), math.exp(min(t, parts.HIGHEST(model)[0] + BEYOND))
    factor[0] = FORGETTING * factor[0] + share * level * math.exp(log[0])
    factor[1] = FORGETTING * factor[1] + share * level * level


@kernel(cost=0.4)
def answer_products(model, e):
    if row.ANSWERS(model).shape[1] == 1:
        t = products.tell(products.parts.LOG_W(model), products.work.PHI(model))
        tell(model, e, t, parts.FACTOR(model), row.UNIT(model)[0])
    else:
        copy_network(model, e)
    return 0


@kernel(cost=0.4)
def learn_products(model, e):
    log = row.LOG(model)
    if log[1] > 0.0:
        weights, b = products.parts.LOG_W(model), products.work.B(model)
        told = products.tell(weights, products.work.PHI(model))
        step = row.TRUST(model)[0] * (log[0] - told) / products.work.GAIN(model)[0]
        for j in range(b.size):
            weights[j] += step * b[j]
        follow(model, told, parts.FACTOR(model))
    return 0


@kernel(cost=0.4)
def answer_trees(model, e):
    if row.ANSWERS(model).shape[1] == 1:
        tell(model, e, trees.work.TOLD(model)[1], of_trees.FACTOR(model), row.UNIT(model)[0])
    else:
        copy_network(model, e)
    return 0


@kernel(cost=0.4)
def learn_trees(model, e):
    if row.LOG(model)[1] > 0.0:
        follow(model, trees.work.TOLD(model)[1], of_trees.FACTOR(model))
    return 0


@called
def copy_network(model, e):
    answers = row.ANSWERS(model)
    for k in range(answers.shape[1]):
        answers[e, k] = answers[0, k]


def start(part, inputs, outputs):
    if not inputs:
        part("FACTOR")[:] = PRIOR


LOG_PRODUCTS = Expert(PRODUCTS, answer_products, learn_products, start, for_numbers=True)
LOG_TREES = Expert(TREES, answer_trees, learn_trees, start, for_numbers=True)
