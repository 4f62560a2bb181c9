"""Where each part of an engine's state lies in its one vector, for Python and for the kernels.

S is the state, a float64 vector; L, the layout, an integer vector of sizes, settings and positions in S. The constants
below are positions in L (`L_`), in the options (`O_`), in the counts of S (`C_`) and in the numbers of a head (`H_`).
"""

from __future__ import annotations

import numpy as np

from sepsa.validation import at_least

# The part of φ = [hidden units, inputs, 1] that a head sees: its end, from some hidden unit on, or hidden units and 1.
END, HIDDEN = range(2)

# L holds sizes and settings, then the start in S of each part, then the width of each hidden layer, then for each head
# its subset of φ, the number of hidden units it sees, its number p of features and the start of its parts in S.
(
    L_DEPTH, L_INPUTS, L_OUTPUTS, L_HEADS, L_BODY, L_ACTIVATIONS, L_WIDEST, L_FEATURES, L_ACTIVATION, L_OPTIMIZER,
    L_STANDARDIZE, L_BATCH, L_ROBUST, L_CLASSES, L_THETA, L_FIRST, L_SECOND, L_MEAN, L_SCALE, L_TYPICAL, L_TYPICAL_RUN,
    L_USUAL, L_LATE, L_GAIN, L_ERROR, L_ERROR_RUN, L_RANGE, L_CALIBRATION, L_COUNTS, L_SIZES,
) = range(30)  # fmt: skip
L_SETTINGS = [L_ACTIVATION, L_OPTIMIZER, L_STANDARDIZE, L_BATCH, L_ROBUST, L_CLASSES]

O_LR, O_DECAY, O_MOMENTUM, O_BETA2, O_EPS, O_NESTEROV, O_DISCOUNT, O_POWER, O_CALIBRATION = range(9)

# The powers are β1^steps and β2^steps.
C_STEPS, C_BETA1_POWER, C_BETA2_POWER, C_OUTLIERS, C_WEIGHT, C_EVIDENCE, C_BEST, C_SINCE = range(8)
COUNTS = 8

# Forgetting and ridge of a head, the coordinate whose ridge is restored next, effective samples, discounted loss and
# weight in the mixture.
H_FORGETTING, H_RIDGE, H_CURSOR, H_SAMPLES, H_LOSS, H_WEIGHT = range(6)
NUMBERS = 6

TEMPERATURES = 17  # inverse ones, from 1/2 in steps of √2, those of `calibration.INVERSE_TEMPERATURES`


class Layout:
    """Where each part of an engine's state lies in its one vector."""

    def __init__(
        self, inputs: int, outputs: int, hidden: tuple[int, ...], subsets: tuple[str, ...], itemsize: int
    ) -> None:
        self.inputs, self.outputs = at_least("inputs", inputs, 1), at_least("outputs", outputs, 1)
        self.subsets = subsets
        self.hidden = tuple(at_least("hidden", width, 1) for width in hidden)
        d, m, last = inputs, outputs, hidden[-1] if hidden else 0
        self.features = last + d + 1
        units = [0 if subset == "inputs" else last for subset in subsets]
        self.head_features = [
            n + 1 + (0 if subset == "hidden" else d) for n, subset in zip(units, subsets, strict=True)
        ]
        widths = (inputs, *hidden)
        q = sum((below + 1) * width for below, width in zip(widths, hidden, strict=False))
        slots = (q * itemsize + 7) // 8  # of float64, for arrays in the body's dtype
        lengths = {
            "THETA": slots, "FIRST": slots, "SECOND": slots, "MEAN": d, "SCALE": d, "TYPICAL": d, "TYPICAL_RUN": d,
            "USUAL": d, "LATE": d, "GAIN": m, "ERROR": 3 * m, "ERROR_RUN": 3 * m, "RANGE": 2 * m,
            "CALIBRATION": TEMPERATURES, "COUNTS": COUNTS,
        }  # fmt: skip
        shared = list(lengths)
        for h, p in enumerate(self.head_features):
            own = {
                "NUMBERS": NUMBERS, "W": m * p, "U": p * (p - 1) // 2, "D": p, "RIDGE": p, "PRIOR": m * p,
                "ENERGY": m,
            }  # fmt: skip
            lengths |= {f"{name}{h}": length for name, length in own.items()}
        self.parts: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, length in lengths.items():
            self.parts[name] = (self.size, length)
            self.size += length
        self.body, self.itemsize = q, itemsize
        sizes = {
            "DEPTH": len(hidden), "INPUTS": d, "OUTPUTS": m, "HEADS": len(subsets), "BODY": q,
            "ACTIVATIONS": d + sum(hidden), "WIDEST": max(hidden, default=0), "FEATURES": self.features,
        }  # fmt: skip
        heads = [
            (HIDDEN if subset == "hidden" else END, units[h], p, self.parts[f"NUMBERS{h}"][0])
            for h, (subset, p) in enumerate(zip(subsets, self.head_features, strict=True))
        ]
        self.numbers = np.zeros(L_SIZES + len(hidden) + 4 * len(heads), dtype=np.int64)
        for name, value in (sizes | {name: self.parts[name][0] for name in shared}).items():
            self.numbers[globals()[f"L_{name}"]] = value
        self.numbers[L_SIZES:] = [*hidden, *(number for head in heads for number in head)]

    def workspace(self, batch: int) -> int:
        """Its size: unit row, b, residuals, φ, outputs of heads; gradient, deltas, activations, slopes of the body."""
        last = self.hidden[-1] if self.hidden else 0
        row = self.features + last + 1 + len(self.subsets) * self.outputs + 1
        high = 2 * self.features + 3 * self.outputs + batch * row
        low = self.body + 2 * max(self.hidden, default=0) + 2 * batch * (self.inputs + sum(self.hidden))
        return high + (low * self.itemsize + 7) // 8
