"""The rule by which forgotten ridge is restored, which every backend and every kernel follows, on numbers.

Forgetting scales the whole curvature by λ in each update, the ridge included. An update therefore restores the full
ridge of the next few coordinates, in rotation. So many coordinates are restored per update that none ever falls below
half of its ridge. An update learns what a coordinate lacks as a row, and never a negative one. Kernels compile these
functions too; `heads.run.triton.tiles` has them for Triton.
"""

from __future__ import annotations

import math
from typing import Any

LEAST_SHARE = 0.5  # of its ridge, below which no coordinate ever falls


def due(p: int, forgetting: float, step: int = 0, at_least: int = 0) -> int:
    """How many of p coordinates update number `step` restores, so that none ever falls below `LEAST_SHARE`.

    Forgetting leaves that share of a ridge after log(share)/log(λ) updates, so in that many each coordinate must have
    its turn. Where that is less than one coordinate an update, one gets its turn every so many updates, and without a
    `step` in each of them.
    """
    count = 0
    if forgetting < 1.0 and p > 0:
        need = p * (math.log2(forgetting) / math.log2(LEAST_SHARE))
        count = math.ceil(need) if need >= 1.0 or step % math.floor(1.0 / need) == 0 else 0
    return min(p, max(count, at_least))


def next_cursor(cursor: Any, count: Any, p: int) -> Any:
    """The coordinate `count` after `cursor`, of p in rotation; numbers or tensors."""
    return (cursor + count) % p
