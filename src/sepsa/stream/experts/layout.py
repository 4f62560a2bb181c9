"""Where each part of the experts' state lies in its one vector, for Python and for the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.stream.engine.layout import TEMPERATURES
from sepsa.stream.experts.neighbours import LANES, NEIGHBOURS, PLACES, TOPS
from sepsa.stream.experts.trees import BINS, LEAVES, SPLITS, TREES
from sepsa.stream.experts.trees import INPUTS as TREE_INPUTS

# The experts, by their rows in the answers; from the logistic one on they are for classes alone. Those of the user
# follow, and the stack is last.
NAMES = ("network", "neighbours", "trees", "products", "last target", "mean", "last errors", "logistic", "naive Bayes")
NETWORK, NEAR, TREE, PRODUCTS, LAST, MEAN, ERRORS, LOGISTIC, BAYES = range(9)

# Settings and sizes at the start of the layout, then the start of each part.
(
    X_INPUTS, X_OUTPUTS, X_EXPERTS, X_WINDOW, X_FEATURES, X_TREE_INPUTS, X_ROBUST, X_CLASSES, X_PARTS,
) = range(9)  # fmt: skip

# The parts in their order.
(
    P_COUNTS, P_CENTRE, P_SCALE, P_LOW, P_HIGH, P_UNIT, P_ERROR, P_ERROR_RUN, P_CALIBRATION, P_SIMPLE, P_GRAM,
    P_MOMENT, P_STACK, P_LOSS, P_WEIGHT, P_W, P_U, P_D, P_BINARY, P_KEYED, P_LOGIT_W, P_LOGIT_U, P_LOGIT_D,
    P_CLASS_MEANS, P_CLASS_COUNTS, P_CLASS_SPREAD, P_GROWTH, P_CHOSEN, P_EDGES, P_DIRECTION, P_SPLIT_INPUTS,
    P_SPLIT_THRESHOLDS, P_VALUES, P_CUTS, P_LEAF_COUNTS, P_HISTOGRAMS, P_ROWS, P_TARGETS, P_SUMS, P_WEIGHTS, P_PACKED,
    P_NODES, P_LEAF_OF_ROW, P_BINS,
) = range(X_PARTS, X_PARTS + 44)  # fmt: skip

# Rows learned, their number in the window, the next place in it, their discounted number, the typical weight, the
# expert with the largest weight, the row since which it is, and the discounted number of rows of any class.
C_ROWS, C_FILLED, C_NEXT, C_EVIDENCE, C_WEIGHT, C_BEST, C_SINCE, C_CLASSED = range(8)

WINDOW = PLACES  # rows, for up to 16 inputs
CELLS = 16 * WINDOW
PAIRED = 10  # inputs of which products are taken
SLOTS = 64  # of the keys whose last errors are kept


class ExpertLayout:
    """Where each part of the experts' state lies in its one vector of float64; some parts hold smaller numbers."""

    def __init__(self, inputs: int, outputs: int, more: int, robust: bool, classes: bool) -> None:
        d, m, logits = inputs, outputs, 1 + inputs if classes else 0
        classed = m if classes else 0
        self.built_in = NAMES if classes else NAMES[:LOGISTIC]
        experts = len(self.built_in) + more
        window = max(64, min(WINDOW, CELLS // d))
        paired = min(d, PAIRED)
        features, chosen = 1 + paired * (paired + 3) // 2, min(d, TREE_INPUTS)
        self.inputs, self.outputs, self.more = d, m, more
        self.shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "COUNTS": (float, (8,)),
            "CENTRE": (float, (d,)),
            "SCALE": (float, (d,)),
            "LOW": (float, (d,)),
            "HIGH": (float, (d,)),
            "UNIT": (float, (m,)),
            "ERROR": (float, (m, 3)),
            "ERROR_RUN": (float, (m, 3)),
            "CALIBRATION": (float, (TEMPERATURES,)),
            "SIMPLE": (float, (2, m)),
            "GRAM": (float, (experts - 1, experts - 1)),
            "MOMENT": (float, (experts - 1,)),
            "STACK": (float, (experts - 1,)),
            "LOSS": (float, (experts + 1,)),
            "WEIGHT": (float, (experts + 1,)),
            "W": (float, (m, features)),
            "U": (float, (features * (features - 1) // 2,)),
            "D": (float, (features,)),
            "BINARY": (float, (d,)),
            "KEYED": (float, (SLOTS, m)),
            "LOGIT_W": (float, (m, logits)),
            "LOGIT_U": (float, (logits * (logits - 1) // 2,)),
            "LOGIT_D": (float, (logits,)),
            "CLASS_MEANS": (float, (classed, d)),
            "CLASS_COUNTS": (float, (classed,)),
            "CLASS_SPREAD": (float, (d,)),
            "GROWTH": (float, (6,)),
            "CHOSEN": (np.int64, (chosen,)),
            "EDGES": (np.float32, (chosen, BINS - 1)),
            "DIRECTION": (float, (m,)),
            "SPLIT_INPUTS": (np.uint32, (TREES + 1, SPLITS)),
            "SPLIT_THRESHOLDS": (np.float32, (TREES + 1, SPLITS)),
            "VALUES": (float, (TREES + 1, LEAVES, m)),
            "CUTS": (np.uint8, (SPLITS,)),
            "LEAF_COUNTS": (float, (LEAVES,)),
            "HISTOGRAMS": (np.int64, (LEAVES // 2, chosen, BINS)),
            "ROWS": (np.float32, (d, window)),
            "TARGETS": (np.float32, (window, m)),
            "SUMS": (np.float32, (window, m)),
            "WEIGHTS": (np.float32, (window,)),
            "PACKED": (np.int64, (window,)),
            "NODES": (np.uint8, (window,)),
            "LEAF_OF_ROW": (np.uint8, (TREES, window)),
            "BINS": (np.uint8, (chosen, window)),
        }
        starts, self.size = [], 0
        for dtype, shape in self.shapes.values():
            starts.append(self.size)
            self.size += (int(np.prod(shape)) * np.dtype(dtype).itemsize + 7) // 8
        settings = [d, m, experts, window, features, chosen, int(robust), int(classes)]
        self.numbers = np.array([*settings, *starts], dtype=np.int64)
        # z, x, φ and b of the products, answers, y, the stack's factor, the row before which the answers were made, the
        # leaves of z, the workspaces of the neighbours (distances and integers), and φ and b of the logistic expert.
        row = 2 * d + 2 * features + (experts + 3) * m + experts * experts + 1 + TREES
        self.workspace = row + window + (LANES + TOPS + NEIGHBOURS + LANES) // 2 + 2 * logits

    def part(self, state: NDArray[np.float64], name: str) -> NDArray[Any]:
        """A part of a state as a view of its dtype and shape."""
        dtype, shape = self.shapes[name]
        start = self.numbers[X_PARTS + list(self.shapes).index(name)]
        count = int(np.prod(shape))
        slots = (count * np.dtype(dtype).itemsize + 7) // 8
        part: NDArray[Any] = state[start : start + slots].view(dtype)[:count].reshape(shape)
        return part
