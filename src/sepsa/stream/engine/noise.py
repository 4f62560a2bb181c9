"""The errors of the compiled engine: the variance of targets about predictions, and the quantiles of |error|."""

from __future__ import annotations

import numpy as np

from sepsa.stream.engine.core import Core
from sepsa.stream.engine.protocol import Floats, residual_degrees

NINE_TENTHS = 1.6448536269514722  # standard deviations within which nine tenths of a normal distribution lie
NORMAL_QUANTILES: Floats = np.array([0.6744897501960817, 1.2815515655446004, NINE_TENTHS])


def variance(core: Core) -> Floats:
    """The variance (outputs,) of targets about predictions.

    With `loss="huber"` it is that of a normal distribution with the 90 % quantile of |error| of recent rows, for errors
    e/√(1 + c φᵀBφ) made before learning, those of the mixture where there are experts; c is the setting `inflation`.
    With `loss="squared"` it is that of ridge regression,

        σ² = (Σ e²/(1 + φᵀBφ) - Σ_j ridge_j |W_j - prior_j|²) / (n - tr BΦᵀΦ),

    since the errors e made before learning sum to the objective at its minimum, and BΦᵀΦ = I - B ridge.
    """
    if not core.form.settings["robust"]:
        penalty, degrees = penalty_and_residual_degrees(core)
        return np.maximum(core.memory("ENERGY", "heads", 0) - penalty, 0.0) / degrees
    sizes = core.memory("ERROR", "network")[:, 2]
    if core.models is not None:
        unit, error = np.sqrt(core.memory("GAIN", "network")), core.memory("ERROR", "mixture")[:, 2]
        sizes = np.divide(error, unit, out=np.zeros_like(error), where=unit > 0)
    return (sizes / NINE_TENTHS) ** 2


def set_variance(core: Core, variance: Floats) -> None:
    """Set the variance (outputs,) of normal errors."""
    penalty, degrees = penalty_and_residual_degrees(core)
    core.memory("ENERGY", "heads", 0)[:] = variance * degrees + penalty
    set_quantiles(core, np.sqrt(variance)[:, None] * NORMAL_QUANTILES)


def set_quantiles(core: Core, quantiles: Floats) -> None:
    """Set the quantiles (outputs, 3) of |error|."""
    groups = {"network": quantiles}
    if core.models is not None:
        groups["mixture"] = quantiles * np.sqrt(core.memory("GAIN", "network"))[:, None]
    for group, values in groups.items():
        core.memory("ERROR", group)[:], core.memory("ERROR_RUN", group)[:] = values, 0.0


def penalty_and_residual_degrees(core: Core) -> tuple[Floats, float]:
    """The ridge's part of the objective (outputs,), and the samples less the degrees of freedom, of the first head."""
    part = core.memory.of("heads", 0)
    ridge, D = part("RIDGE"), part("D")
    column, row = np.tril_indices(len(D), -1)  # U's columns lie one after the other
    free = len(D) - float(D @ ridge + (part("U") ** 2 * ridge[row]) @ D[column])
    penalty = (part("W") - part("PRIOR")) ** 2 @ ridge
    return residual_degrees(penalty, float(part("NUMBERS")["samples"]), free)
