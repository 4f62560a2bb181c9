"""The ranks that learn one head together: how they are found, their common start, and the failure of one of them."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

from sepsa.heads import HeadSolver
from sepsa.ranks import exchange
from sepsa.torch_internals import active_ddp, is_joined


class Ranks:
    """The process group of one head."""

    started = False  # whether all ranks have had one start
    warned_alone = False
    ddp: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the DistributedDataParallel, once known

    sharded: Any = None  # the group of fully_shard, if the model is sharded

    def __init__(self, name: str, head: nn.Linear, solver: HeadSolver, setting: Any) -> None:
        self.name, self.head, self.solver, self.setting = name, head, solver, setting

    def group(self) -> Any:
        """The process group to learn with; None, with one warning, where other ranks exist in no known group."""
        group, ddp = self.setting, active_ddp()
        if group is None:
            return None
        if ddp is not None:
            self.ddp = weakref.ref(ddp)
            if is_joined(ddp):
                raise RuntimeError(
                    "a head cannot learn inside ddp.join(), where a rank that has run out of batches would miss the "
                    "exchange of samples: give all ranks the same number of batches, by DataLoader(..., "
                    "drop_last=True) and a DistributedSampler"
                )
        if group == "auto":
            group = self.sharded if ddp is None else ddp.process_group
        if group is not None and exchange.size_of(group) > 1:
            return group
        if self.setting == "auto" and not self.warned_alone and (ranks := exchange.size_of()) > 1:
            self.warned_alone = True
            warnings.warn(
                f"torch.distributed has {ranks} ranks, but the model is not inside DistributedDataParallel or "
                f"fully_shard: the head {self.name!r} learns from this rank's samples alone. Wrap the model, or pass "
                "SepSA(..., process_group=torch.distributed.group.WORLD), or process_group=None to train one head per "
                "rank",
                stacklevel=4,
            )
        return None

    def start_together(self, group: Any) -> bool:
        """Give all ranks the first one's head and solver, once. Returns whether this was the time."""
        if self.started:
            return False
        exchange.share_start(group, self.head, self.solver)
        self.started = True
        return True

    def report_failure(self, error: Exception, trace: TracebackType | None) -> None:
        """Tell the ranks that wait at the head that this one failed on its way there; each of them raises an error.

        Not beside fully_shard: there the others may wait for parameters of layers before the head. Nor before the first
        forward of a DistributedDataParallel, which is known from then on.
        """
        inside = exchange.ddp_in(trace)
        group, ddp = self.setting, inside or self.ddp()
        if group == "auto":
            group = None if ddp is None or self.warned_alone else ddp.process_group
        if group is None or self.sharded is not None or exchange.size_of(group) == 1:
            return
        with contextlib.suppress(Exception):  # the failure itself is raised, whatever happens to the other ranks
            if ddp is not None and trace is not None and inside is None:
                exchange.enter_forward(ddp)  # as the others do, before they reach the head
            exchange.share_headers(group, None, error, "failed before its samples reached the head")

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in ("ddp", "sharded")}
        return state | {"setting": self.setting if self.setting in ("auto", None) else "auto"}
