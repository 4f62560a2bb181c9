"""The rule by which forgotten ridge is restored, which every backend and every kernel follows, on numbers.

Forgetting scales the whole curvature by λ in each update, the ridge included. An update therefore restores the full
ridge of the next few coordinates, in rotation. So many coordinates are restored per update that none ever falls below
half of its ridge. Kernels compile these functions too.
"""

from __future__ import annotations

import math
from typing import Any


def due(p: int, forgetting: float, step: int = 0, at_least: int = 0) -> int:
    """How many of p coordinates update number `step` restores, so that none ever falls below half of its ridge.

    Forgetting halves a ridge in -1/log2(λ) updates, so in that many each coordinate must have its turn. Where that is
    less than one coordinate an update, one gets its turn every so many updates, and without a `step` in each of them.
    """
    count = 0
    if forgetting < 1.0:
        need = -p * math.log2(forgetting)
        count = math.ceil(need) if need >= 1.0 or step % math.floor(1.0 / need) == 0 else 0
    return min(p, max(count, at_least))


def next_cursor(cursor: Any, count: Any, p: int) -> Any:
    """The coordinate `count` after `cursor`, of p in rotation; numbers or tensors."""
    return (cursor + count) % p


def lack(ridge: float, left: float) -> float:
    """The ridge that a coordinate lacks, of which so much is left."""
    return max(0.0, ridge - left)
