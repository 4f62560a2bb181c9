"""Experts for a single positive target that multiplies: products and trees that predict its logarithm.

They answer for t = log((y + s)/(a + s)), where a is the level of the first targets and s a twentieth of it, so that a
zero is no harm. Features, curvature and splits are those of `products` and `trees`, to which t is one more target; the
answer is c(a + s)eᵗ - s, where c is the least-squares factor between such answers and the targets of recent rows. Where
the first targets are not positive, and from the first negative target on, they answer as the network does.
"""

from __future__ import annotations

import math

from sepsa.stream.experts import products, trees
from sepsa.stream.experts.frame import Expert, given, row
from sepsa.stream.kernels.compilation import called, kernel
from sepsa.stream.kernels.parts import Field, Part, Record
from sepsa.stream.kernels.views import Group

SHIFT = 0.05  # s/a
PRIOR = 20.0  # rows at which the factor c is 1
BEYOND = 0.5  # the largest t in an answer, above that of all rows

# The sums of which c is the ratio: of targets times answers, and of squared answers.
FACTOR = Record(products=Field(float, PRIOR), squares=Field(float, PRIOR))
parts = Group(
    given,
    "log products",
    Part("ORIGIN", Record(value=float)),  # a + s, 0 where the experts are silent
    Part("HIGHEST", Record(value=Field(float, bounds=(None, None)))),  # the largest t of all rows
    Part("FACTOR", FACTOR),
)
of_trees = Group(given, "log trees", Part("FACTOR", FACTOR))


@called
def take_logarithm(model, target, y, unit):
    """Fill the row's t by its target, bounded as y in units, and whether there is one."""
    origin, facts, highest = parts.ORIGIN(model), row.FACTS(model), parts.HIGHEST(model)
    lowest = origin.value * SHIFT / (1.0 + SHIFT)
    if target + origin.value < lowest * (1.0 - 1e-9):
        origin.value = 0.0
    facts.origin = origin.value
    if origin.value > 0.0:
        facts.log = math.log(max((y / unit if unit > 0.0 else target) + origin.value, lowest) / origin.value)
        highest.value = max(highest.value, facts.log)


@called
def level(model, t):
    """eᵗ, within what the rows so far let expect."""
    return math.exp(min(t, parts.HIGHEST(model).value + BEYOND))


@called
def tell(model, e, t, factor):
    """Answer by a prediction of t, or as the network does where there is no logarithm."""
    origin, answers = parts.ORIGIN(model).value, row.ANSWERS(model)
    for k in range(answers.shape[1]):
        answers[e, k] = answers[0, k]
    if origin > 0.0:
        answers[e, 0] = origin * (level(model, t) * factor.products / factor.squares - 1.0) * row.UNIT(model)[0]


@called
def follow(model, t, factor):
    """Add the row to the sums of which the factor is the ratio."""
    facts, told, forgetting = row.FACTS(model), level(model, t), 0.998
    factor.products = forgetting * factor.products + facts.share * told * math.exp(facts.log)
    factor.squares = forgetting * factor.squares + facts.share * told * told


@kernel(cost=0.4)
def answer_products(model, e):
    weights, phi = products.parts.views("LOG_W PHI", model)
    tell(model, e, products.tell(weights, phi), parts.FACTOR(model))
    return 0


@kernel(cost=0.4)
def learn_products(model, e):
    facts = row.FACTS(model)
    if facts.origin > 0.0:
        weights, phi, b, gain = products.parts.views("LOG_W PHI B GAIN", model)
        told = products.tell(weights, phi)
        step = facts.trust * (facts.log - told) / gain.value
        for j in range(b.size):
            weights[j] += step * b[j]
        follow(model, told, parts.FACTOR(model))
    return 0


@kernel(cost=0.4)
def answer_trees(model, e):
    tell(model, e, trees.parts.TOLD(model)[1], of_trees.FACTOR(model))
    return 0


@kernel(cost=0.4)
def learn_trees(model, e):
    if row.FACTS(model).origin > 0.0:
        follow(model, trees.parts.TOLD(model)[1], of_trees.FACTOR(model))
    return 0


LOG_PRODUCTS = Expert(parts, answer_products, learn_products, for_numbers=True)
LOG_TREES = Expert(of_trees, answer_trees, learn_trees, for_numbers=True)
