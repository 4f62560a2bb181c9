"""The checks that every head solver passes, those of this package and those of users.

Run `check_solver(make)` in the tests of your own solver: it raises an AssertionError that says what
`sepsa.HeadSolver` promises and what happened instead. `CHECKS` has the checks one by one, for a parametrized test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sepsa.testing import checks
from sepsa.testing.case import Case, difference, not_finite, snapshot
from sepsa.testing.interrupts import interrupt, interrupts_leave_before_or_after, modes_restored

__all__ = ["CHECKS", "Case", "check_solver", "difference", "interrupt", "modes_restored", "not_finite", "snapshot"]

CHECKS: dict[str, Callable[[Case], None]] = {
    "learns": checks.learns,
    "block": checks.block_equals_loop,
    "shapes and dtypes": checks.shapes_and_dtypes,
    "loss": checks.loss_is_a_loss,
    "bad input": checks.bad_input_changes_nothing,
    "too large": checks.too_large_is_refused_or_survived,
    "one head": checks.owns_one_head,
    "copies": checks.copies_go_on_alike,
    "wrong states": checks.wrong_states_change_nothing,
    "rollback": checks.rolls_back,
    "interrupts": interrupts_leave_before_or_after,
    "SepSA": checks.drops_into_sepsa,
    "captured": checks.captured_updates_equal_update,
}


def check_solver(
    make: Callable[[], Any],
    *,
    task: str = "regression",
    recovers: float = 0.01,
    block: float | None = None,
    too_large: float = 1e300,
    outputs: int = 3,
    weighted: bool = True,
    falls_to: float = 0.7,
    interrupts: int = 20,
    only: Iterable[str] | None = None,
) -> None:
    """Check that the solvers of `make()`, each new and unbound, keep all that `HeadSolver` promises.

    - `task`: "regression", or "classification" for targets that are class probabilities, or "labels" for targets of
      0 and 1 that do not exclude each other.
    - `recovers`: how near the head comes to the true weights in 300 batches of 16 samples, relative to their norm.
    - `block`: how near an update of n samples is to n updates of one, or None where they are not alike.
    - `too_large`: a factor at which features cannot be squared in the solver's dtype.
    - `outputs`: the head's out_features. `weighted`: whether it takes sample_weight, or refuses any.
    - `falls_to`: the fraction of its first loss that a small network reaches after 300 steps in SepSA.
    - `interrupts`: at how many random instants of `update` it is interrupted.
    - `only`: names of `CHECKS`, for some of them.

    The methods of `Capturable`, and `checkpoint` and `rollback`, are checked where a solver has them.
    """
    if task not in ("regression", "classification", "labels"):
        raise ValueError(f"task must be 'regression', 'classification' or 'labels', got {task!r}")
    case = Case(make, task, recovers, block, too_large, outputs, weighted, falls_to, interrupts)
    names = list(CHECKS) if only is None else list(only)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"only must name checks, {', '.join(map(repr, CHECKS))}, got {name!r}")
        CHECKS[name](case)
