"""Scales of inputs and targets, from rows with missing values and outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.arithmetic.bounds import BURST, DISTANCES, FLOOR, GAP_X, GROWTH_X, LONGEST, ORDINARY, QUANTILE
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.memory.parts import Floats


def moments(X: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted mean and variance of each column over the values that are not missing; 0 where all are."""
    there = ~np.isnan(X)
    w = weight[:, None] * there
    total = np.maximum(w.sum(0), np.finfo(float).tiny)
    first = np.where(there.any(0), X[there.argmax(0), np.arange(X.shape[1])], 0.0)
    off = np.where(there, X - first, 0.0)  # from the first value, so that a constant has exactly no deviation
    shift = (w * off).sum(0) / total
    return first + shift, (w * np.where(there, off - shift, 0.0) ** 2).sum(0) / total


def order_of_columns(X: Floats, names: Sequence[Any]) -> NDArray[np.intp]:
    """The order (columns,) of columns by their values, in the order of rows, and of equal columns by their names.

    Standardized values come first, so that the order depends on units only where rows are too few to tell.
    """
    with np.errstate(all="ignore"):
        mean, variance = moments(X, np.ones(len(X)))
        rounded = np.round((X - mean) * reciprocal(np.sqrt(variance)), 6)
    keys = np.nan_to_num(np.concatenate([rounded, X]), nan=np.inf, posinf=np.inf, neginf=-np.inf).T.tolist()
    return np.array(sorted(range(X.shape[1]), key=lambda j: (keys[j], names[j])), np.intp)


def first_excess(off: Floats, typical: Floats) -> Floats:
    """The excess (columns,) of far inputs by their distances from the mean (n, columns) in first rows.

    A fiftieth of the rows, and four more, may be as far away as they like: the value after those tells ρ.
    """
    bound = np.maximum(FLOOR, DISTANCES * typical)
    off = np.where(np.abs(off) < GAP_X * bound, off, 0.0)
    spared = int(BURST + ORDINARY * len(off))
    if len(off) <= spared:
        return np.zeros(off.shape[1])
    quantile = -np.partition(-np.abs(off), spared, axis=0)[spared]
    rho = np.clip(QUANTILE * quantile / bound, 1.0, LONGEST)
    return np.where(rho > 1, BURST + np.log(rho) / math.log(GROWTH_X), 0.0)


def is_indicator(values: Floats, share: float) -> bool:
    """Whether values that are there in this share of the rows are indicators or counts, for which missing means zero.

    Those are integers from 1 on, a quarter of them 1 and none 0; or any numbers but 0 in less than a tenth of the rows.
    """
    if not values.size or (values == 0).any():
        return False
    counts = (values >= 1).all() and (values == np.floor(values)).all() and (values == 1).mean() >= 0.25
    return bool(counts or share < 0.1)


def scaled_as_they_came(X: Floats) -> bool:
    """Whether first rows (n, d) look like those of a scaler that learned each row before it standardized it.

    Each of its columns starts at 0. The first other value, after t rows, is the largest that t rows allow: ±√t with
    River's `StandardScaler`, one number for all t with its `AdaptiveStandardScaler`. That must hold for most columns;
    those of integers, such as indicators, are left out, and so are those with missing values.
    """
    sizes = np.abs(X)
    sizes = sizes[:, (sizes % 1 != 0).any(0) & (sizes > 1e-6).any(0) & ~np.isnan(X).any(0)]
    if not sizes.size:
        return False
    t, changed = np.arange(len(sizes)), (sizes > 1e-6).argmax(0)
    jump = sizes[changed, np.arange(sizes.shape[1])]
    bounds = [np.sqrt(t), np.median(jump) * (t > 0)][: sizes.shape[1]]  # one column alone has no number in common
    return any(
        (np.isclose(jump, bound[changed], rtol=1e-4) & (sizes <= 1.0001 * bound[:, None]).all(0)).mean() > 0.5
        for bound in bounds
    )


def trimmed(X: Floats) -> Floats:
    """X with NaN where a value lies more than 30 typical distances from its column's median.

    The typical distance is the median over the values that differ from the median, so that a rare indicator is kept.
    """
    X = np.clip(X, -HUGE, HUGE)
    off = X - column_quantiles(X, [0.5])[:, 0]
    return np.where(np.abs(off) > 30 * quantiles_of_sizes(off, [0.5])[:, 0], np.nan, X)


def plausible(Y: Floats, weight: Floats, predictions: Floats) -> tuple[Floats, Floats]:
    """Targets Y (n, outputs) no farther from predictions than is plausible, and weights (n,) of the rows.

    Plausible is three times as far as nine tenths of the errors, or as far as all but a fiftieth of them and four more.
    The weight of a row beyond that falls with the square of its distance.
    """
    Y = np.clip(Y, -HUGE, HUGE)
    sizes, last = np.abs(Y - predictions), len(Y) - 1
    ordered = np.sort(sizes, axis=0)
    spared = int(BURST + ORDINARY * len(Y))
    most = np.maximum(3 * ordered[int(0.9 * last)], ordered[max(last - spared, 0)])
    trust = np.divide(most, sizes, out=np.ones_like(Y), where=sizes > most).min(1)
    return np.clip(Y, predictions - most, predictions + most), weight * trust**2


def quantiles_of_sizes(X: Floats, levels: list[float]) -> Floats:
    """The quantiles (columns, levels) of |x| over the values of a column that are not missing or 0; 0 without any."""
    sizes = np.abs(X)
    return column_quantiles(np.where(sizes > 0, sizes, np.nan), levels)


def column_quantiles(X: Floats, levels: list[float]) -> Floats:
    """The quantiles (columns, levels) of each column, each one of its values; 0 where all are missing."""
    ordered = np.sort(X, axis=0)  # NaN comes last
    there = (~np.isnan(X)).sum(0)
    at = np.minimum((np.array(levels) * there[:, None]).astype(int), np.maximum(there - 1, 0)[:, None])
    return np.where(there[:, None] > 0, ordered[at, np.arange(X.shape[1])[:, None]], 0.0)


def reciprocal(x: Floats) -> Floats:
    """1/x, and 0 where x is below 1e-290."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 1e-290)


def quotient(a: Floats, b: Floats) -> Floats:
    """a/b, and 0 where b is not positive."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)
