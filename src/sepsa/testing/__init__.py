"""The checks that every head solver passes, those of this package and those of users.

Run `check_solver(make)` in the tests of your own solver: it raises an AssertionError that says what
`sepsa.HeadSolver` promises and what happened instead. `CHECKS` has the checks one by one, for a parametrized test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sepsa.testing import checks
from sepsa.testing.case import Case, difference, not_finite, snapshot

__all__ = ["CHECKS", "Case", "check_solver", "difference", "not_finite", "snapshot"]

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
    "SepSA": checks.drops_into_sepsa,
    "captured": checks.captured_updates_equal_update,
}


def check_solver(make: Callable[[], Any], *, only: Iterable[str] | None = None, **declared: Any) -> None:
    """Check that a head solver keeps all promises of `HeadSolver`, and of `Capturable` and `Revertible` where it has
    them.

    Choose it for the tests of your own solver: an AssertionError says what the protocol promises and what happened.

    Args:
        make: A function that returns a new solver, not bound to a head.
        only: Names of `CHECKS`, to run only these.
        **declared: What you declare about the solver: the further fields of `Case`.

    Examples:
        >>> from sepsa import RLS
        >>> from sepsa.testing import check_solver
        >>> check_solver(RLS, only=["learns", "rollback"])
    """
    case = Case(make, **declared)
    if case.task not in ("regression", "classification", "labels"):
        raise ValueError(f"task must be 'regression', 'classification' or 'labels', got {case.task!r}")
    for name in CHECKS if only is None else only:
        if name not in CHECKS:
            raise ValueError(f"only must name checks, {', '.join(map(repr, CHECKS))}, got {name!r}")
        CHECKS[name](case)
