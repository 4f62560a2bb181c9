"""A change of a series' scale by a power of two: all that is in its units changes with it, and no bit is lost.

It is rare, so that NumPy does it; the ridge that a change takes from a head is restored by a kernel.
"""

from __future__ import annotations

import math

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL, array_at, kernel
from sepsa.forecast.kernels.parts import SMALLEST
from sepsa.forecast.kernels.step import CHANGE
from sepsa.learner.arithmetic.head import rank_one
from sepsa.learner.memory.memory import Memory
from sepsa.learner.memory.parts import Floats


def follow_scales(memory: Memory) -> None:
    """Change the scale of each series whose spread has left it."""
    part = memory.of("shared")
    for j, spread in enumerate(part("SPREAD").tolist()):
        if spread <= 0.0 or 1.0 / CHANGE < spread < CHANGE:
            continue
        least = max(SMALLEST * abs(part("MEAN")[j]), 1e-90) / part("SCALE")[j]
        factor = 2.0 ** math.floor(math.log2(max(spread, least)))
        if factor < 0.5 or factor > 2.0:
            change_heads(memory, j, factor)
            change_stack(memory, j, factor)
            memory.divide("series", factor, j)


@kernel
def restore(model, p):
    """Restore lost ridge in B = UDUᵀ and in weights W (n, p).

    `model` has n and the addresses of U, D, the ridge that is left, the ridge, W, and two zero vectors (p,).
    """
    U, D = array_at(model[1], (p * (p - 1) // 2,), np.float64), array_at(model[2], (p,), np.float64)
    left, ridge = array_at(model[3], (p,), np.float64), array_at(model[4], (p,), np.float64)
    W = array_at(model[5], (model[0], p), np.float64)
    r, unit = array_at(model[6], (p,), np.float64), array_at(model[7], (p,), np.float64)
    for b in range(p):
        lacking = ridge[b] - left[b]
        if lacking > 0.0:
            left[b], unit[b] = ridge[b], 1.0
            total = rank_one(U, D, unit, b, lacking, r)
            unit[b] = 0.0
            for i in range(W.shape[0]):
                old = lacking / total * W[i, b]
                for n in range(p):
                    W[i, n] -= r[n] * old
    return 0


def change_covariance(U: Floats, D: Floats, left: Floats, ridge: Floats, by: Floats, W: Floats) -> None:
    """Let the inputs of a head become `by` (p,) times as large; lost ridge is restored in B and in all weights W."""
    column, row = np.tril_indices(len(by), -1)
    U *= by[column] / by[row]
    D /= by**2
    left *= by**2
    if (left < ridge).any():
        arrays = (U, D, left, ridge, W, *np.zeros((2, len(by))))
        model = np.array([W.size // len(by), *(array.ctypes.data for array in arrays)])
        CALL(code.address(restore))(model.ctypes.data, len(by))


def change_heads(memory: Memory, j: int, factor: float) -> None:
    """Divide the values of series j by `factor` in the heads of all series."""
    part, ridge = memory.of("heads"), memory("RIDGE", "fixed")
    W, first, restored = part("W"), part("FIRST"), part("RESTORED")
    for i, series in enumerate(memory("TERM_SERIES", "fixed")):
        by, target = np.ones(ridge.size), factor if i == j else 1.0
        by[: series.size][series == j] = 1.0 / factor
        part("X")[:, i] *= by
        part("GAIN")[:, :, i] /= by
        at = (first[:, :, i, None] + np.arange(restored.shape[3])) % ridge.size
        restored[:, :, i] *= np.where(first[:, :, i, None] < 0, 1.0, by[at])[..., None] / by
        part("LOSS")[:, i] /= target**2
        W[:, i] /= target * by
        for v in range(len(W)):
            change_covariance(part("U")[v, i], part("D")[v, i], part("LEFT")[v, i], ridge, by, W[v, i : i + 1])


def change_stack(memory: Memory, j: int, factor: float) -> None:
    """Divide the inputs and targets of the stacks of series j by `factor`."""
    part, ridge = memory.of("stack"), memory("STACK_RIDGE", "fixed")
    W, by = part("W"), np.full(ridge.size, 1.0 / factor)
    by[:1] = 1.0
    W[j] /= factor * by
    for h in range(W.shape[1]):
        change_covariance(part("U")[j, h], part("D")[j, h], part("LEFT")[j, h], ridge, by, W[j : j + 1, h : h + 1])
