"""The table of experts: the network, neighbours, trees, products and simple rules, weighted by their recent errors.

A new expert is a file with what it stores and two kernels, and a row here.
"""

from __future__ import annotations

from sepsa.stream.engine.kernels.views import Group, register
from sepsa.stream.engine.layout import SIZES
from sepsa.stream.experts import bayes, expert, logarithm, logistic, neighbours, network, products, simple, step, trees
from sepsa.stream.experts.expert import Expert

# In the order of their answers; those for classes alone come last.
EXPERTS: tuple[Expert, ...] = (
    network.EXPERT,
    neighbours.EXPERT,
    trees.EXPERT,
    products.EXPERT,
    simple.LAST_TARGET,
    simple.MEAN_TARGET,
    simple.LAST_ERRORS,
    logarithm.LOG_PRODUCTS,
    logarithm.LOG_TREES,
    logistic.EXPERT,
    bayes.EXPERT,
)
HEADS = network.HEADS
MIXTURE = (step.GROUP, expert.GROUP)  # what an engine with several experts stores beside theirs
register(SIZES, (HEADS, *MIXTURE, *(each.group for each in EXPERTS)))


def table(all_of_them: bool, classes: bool, double: bool) -> tuple[Expert, ...]:
    """The experts of an engine: the network alone, or all, and those for classes; `double` is the body's precision."""
    others = [each for each in EXPERTS[1:] if all_of_them and not (each.for_numbers if classes else each.for_classes)]
    return (network.IN_DOUBLE if double else network.EXPERT, *others)


def groups(experts: tuple[Expert, ...]) -> tuple[Group, ...]:
    """What these experts store, and their mixture where there are several."""
    return (*(each.group for each in experts), HEADS, *(MIXTURE if len(experts) > 1 else ()))
