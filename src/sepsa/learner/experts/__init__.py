"""The table of experts: the network, neighbours, trees, products and simple rules, weighted by their recent errors.

A new expert is a file with what it stores and two kernels, and a row here.
"""

from __future__ import annotations

from sepsa.learner.experts import bayes, linear, logistic, neighbours, network, products, simple, trees
from sepsa.learner.experts.frame import Expert

# In the order of their answers; those for classes alone come last.
EXPERTS: tuple[Expert, ...] = (
    network.EXPERT,
    neighbours.EXPERT,
    trees.EXPERT,
    products.EXPERT,
    simple.LAST_TARGET,
    linear.EXPERT,
    simple.LAST_ERRORS,
    logistic.EXPERT,
    bayes.EXPERT,
)
