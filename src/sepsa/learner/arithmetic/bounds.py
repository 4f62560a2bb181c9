"""How far a value may lie away before it is an outlier. The law: what more than one row in fifty has is none.

A bound is a number of typical sizes, as is right for normal values. Of each input and each target the learner counts
how many more values were far away than one in fifty rows,

    excess <- max(0, excess + [far] - 1/50),        ρ = min(8, growth^(excess - 4)) where excess > 4, else 1,

and moves by ρ what is far, so that the count stays where one row in fifty is: ρ compares the tail with a normal one.
Four values in a burst, and single ones in less than one row in fifty, change nothing. Nor does any number of values
that lie behind a gap, many bounds away: a tail has values on the way, a code for missing values such as -9999 has none.
"""

from __future__ import annotations

import math

from sepsa.compiled.kernels import inlined

HUGE = 1e100  # of a value, so that squares, and their weighted sums, stay finite
ORDINARY = 0.02  # share of rows
BURST = 4.0  # values
LONGEST = 8.0  # ρ
GROWTH_X, GROWTH_E = 1.1, 1.5  # by one value, of the bounds on inputs and on errors
FLOOR, DISTANCES = 6.0, 16.0  # standard deviations within which no input is clipped; typical distances
GAP_X, GAP_E = 8.0, 16.0  # bounds on inputs, and on errors, behind which no value belongs to a tail
QUANTILE = 4.64  # 16 median distances over the 98 % quantile of normal values: 16 · 0.6745/2.326


@inlined
def follow_excess(excess, far, growth):
    """The count after a row; it ends where ρ is 8."""
    return min(max(excess + (1.0 if far else 0.0) - ORDINARY, 0.0), BURST + math.log(LONGEST) / math.log(growth))


@inlined
def stretch(excess, growth):
    """ρ, the factor of a bound."""
    return growth ** (excess - BURST) if excess > BURST else 1.0


@inlined
def distance(x, mean, scale):
    """The standardized distance of an input from its mean, with its sign."""
    return (min(max(x, -HUGE), HUGE) - mean) * scale


@inlined
def is_far(z, typical, excess):
    """Whether an input lies farther away than the 98 % quantile that its bound stands for, and before a gap."""
    bound, rho = max(FLOOR, DISTANCES * typical), stretch(excess, GROWTH_X)
    return QUANTILE * z > bound * rho and z < GAP_X * bound * rho * rho


@inlined
def clip_bound(typical, excess):
    """The standardized distance from the mean at which an input with this typical distance is clipped.

    A tail that is ρ times as long as a normal one at its 98 % quantile is taken for ρ² times as long beyond it.
    """
    return max(FLOOR, DISTANCES * typical) * stretch(excess, GROWTH_X) ** 2
