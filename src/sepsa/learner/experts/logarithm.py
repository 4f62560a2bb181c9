"""An expert for a single positive target that multiplies: trees that predict its logarithm.

It answers for t = log((y + s)/(a + s)), where a is the level of the first targets and s a twentieth of it, so that a
zero is no harm. Splits are those of `trees`, to which t is one more target; the answer is c(a + s)eᵗ - s, where c is
the least-squares factor between such answers and the targets of recent rows. Where the first targets are not positive,
and from the first negative target on, it answers as the network does.
"""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import copy
from sepsa.learner.experts import trees
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.memory.parts import Field, Part, Record
from sepsa.learner.memory.views import Group

SHIFT = 0.05  # s/a
PRIOR = 20.0  # rows at which the factor c is 1
BEYOND = 0.5  # the largest t in an answer, above that of all rows

parts = Group(
    given,
    "log trees",
    Part("ORIGIN", Record(value=float)),  # a + s, 0 where the expert is silent
    Part("HIGHEST", Record(value=float)),  # the largest t of all rows
    # The sums of which c is the ratio: of targets times answers, and of squared answers.
    Part("FACTOR", Record(products=Field(float, PRIOR), squares=Field(float, PRIOR))),
)


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
def level(model):
    """eᵗ for the trees' prediction t, within what the rows so far let expect."""
    return math.exp(min(trees.parts.TOLD(model)[1], parts.HIGHEST(model).value + BEYOND))


@kernel
def answer(model, e):
    """Answer by the trees' prediction of t, or as the network does where there is no logarithm."""
    origin, factor, answers = parts.ORIGIN(model).value, parts.FACTOR(model), row.ANSWERS(model)
    copy(answers[0], answers[e])
    if origin > 0.0:
        told = level(model)
        answers[e, 0] = origin * (told * factor.products / factor.squares - 1.0) * row.UNIT(model)[0]
    return 0


@kernel
def learn(model, e):
    """Add the row to the sums of which the factor is the ratio."""
    facts, factor, forgetting = row.FACTS(model), parts.FACTOR(model), 0.998
    if facts.origin > 0.0:
        told = level(model)
        factor.products = forgetting * factor.products + facts.share * told * math.exp(facts.log)
        factor.squares = forgetting * factor.squares + facts.share * told * told
    return 0


EXPERT = Expert(parts, answer, learn, for_numbers=True)
