"""The battery fails broken solvers, each for its own reason; docs/how-to/solvers.md runs it on its own."""

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from in_sepsa import FURTHER
from interrupts import interrupts_leave_before_or_after
from sepsa import NotFinite
from sepsa.heads import Capturable, HeadSolver
from sepsa.testing import CHECKS, Case, check_solver

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "solvers.md"
CODE = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)[1]


@pytest.fixture(scope="module")
def NLMS():
    """The solver that the document writes."""
    written = ModuleType("nlms")
    exec(compile(CODE, str(DOCUMENT), "exec"), vars(written))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nlms", written)  # where pickles look for its class
        yield written.NLMS


def test_the_documented_solver_is_short_and_keeps_both_protocols(NLMS):
    written = [line for line in CODE.splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(written) <= 80  # of at most 88 characters
    assert isinstance(NLMS(), HeadSolver)
    assert isinstance(NLMS(), Capturable)


def test_the_document_names_every_check():
    cells = re.findall(r"^\| (`[^|]+`) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert sorted(name for cell in cells for name in re.findall(r"`(.+?)`", cell)) == sorted(CHECKS)


def revive(kind, attributes):
    solver = kind.__new__(kind)
    solver.__dict__.update(attributes)
    return solver


def spoiled(base):
    """Solvers like `base`, each broken in one way."""

    class Local(base):
        def __reduce_ex__(self, protocol):  # copies find no class inside a function by its name
            return revive, (type(self), dict(self.__dict__))

    class LearnsNothing(Local):
        def _write(self, new):
            self.steps.add_(1)

    class LearnsBeforeItLooks(Local):
        def update(self, features, targets, sample_weight=None):
            with torch.no_grad():
                self.linear.weight.add_(1e-3)
            super().update(features, targets, sample_weight)

    class SwallowsNaN(Local):
        def update(self, features, targets, sample_weight=None):
            with contextlib.suppress(NotFinite):
                super().update(features, targets, sample_weight)

    class Tears(Local):
        @torch.no_grad()
        def _write(self, new):
            for old, value in zip(self._tensors(), new, strict=True):
                old.copy_(value)  # without commit

    class KeepsAPartOfItsStateBack(Local):
        def update(self, features, targets, sample_weight=None):
            self.calls = getattr(self, "calls", 0) + 1  # in no state
            weight = features.new_full(features.shape[:-1], 1 / self.calls)
            super().update(features, targets, weight if sample_weight is None else sample_weight)

    class SharesItsState(Local):
        def state_dict(self):
            return super().state_dict() | {"steps": self.steps}

    class LoadsInPieces(Local):
        def load_state_dict(self, state_dict):
            self.steps = torch.zeros_like(self.steps)
            super().load_state_dict(state_dict)

    class TakesAnyHead(Local):
        def bind(self, linear):
            self.linear = None
            return super().bind(linear)

    class SumsItsLoss(Local):
        def loss(self, outputs, targets):
            return (outputs - targets).square().sum()

    class CapturesSomethingElse(Local):
        def update_captured(self, features, targets):
            return super().update_captured(features, 2 * targets)

    class CapturedNaNGoesIn(Local):
        @torch.no_grad()
        def update_captured(self, features, targets):
            new, fine = self._learned(features, targets)
            self._write(new)
            return fine

    class RollsBackTheHeadAlone(Local):
        def checkpoint(self):
            return self.linear.weight.detach().clone()

        def rollback(self, token):
            with torch.no_grad():
                self.linear.weight.copy_(token)

    class Overflows(Local):
        def _learned(self, features, targets, sample_weight=None):
            new, _ = super()._learned(features, targets, sample_weight)
            return new, bool(features.isfinite().all() & targets.isfinite().all())

    return {kind.__name__: kind for kind in Local.__subclasses__()}


BROKEN = {  # the class, the check that finds it, and the words
    "LearnsNothing": ("learns", r"promised: after 300 batches .* within 0\.01 of the truth .*; but they are"),
    "LearnsBeforeItLooks": (
        "bad input",
        r"promised: NaN in the features changes nothing; but it changed state\['head'\]\['weight'\]",
    ),
    "SwallowsNaN": ("bad input", "promised: NaN in the features raises NotFinite; but nothing was raised"),
    "KeepsAPartOfItsStateBack": (
        "copies",
        r"promised: a checkpoint goes on bit for bit; but state\['head'\]\['\w+'\] differs",
    ),
    "SharesItsState": ("copies", "promised: states are copies both ways; but writing into one changed"),
    "LoadsInPieces": (
        "wrong states",
        r"promised: a state .* is refused whole; but it changed state\['solver'\]\['steps'\]",
    ),
    "TakesAnyHead": ("one head", "promised: bind to a second head raises ValueError; but nothing was raised"),
    "SumsItsLoss": ("loss", "promised: loss is a mean over samples; but it is"),
    "CapturesSomethingElse": ("captured", "promised: update_captured learns what update does; but the head's weight"),
    "CapturedNaNGoesIn": ("captured", "promised: NaN in features changes nothing in update_captured"),
    "RollsBackTheHeadAlone": ("rollback", r"promised: rollback\(checkpoint\(\)\) undoes updates bit for bit; but"),
    "Overflows": ("too large", "promised: .* on a float16 head are refused as NotFinite, or everything stays finite"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_solver_fails_for_its_own_reason(NLMS, name):
    check, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_solver(spoiled(NLMS)[name], only=[check])


def test_a_solver_that_writes_without_commit_is_torn(NLMS):
    with pytest.raises(
        AssertionError, match=r"promised: an update interrupted at any .*; but \d+ of 30 interrupts tore it"
    ):
        interrupts_leave_before_or_after(Case(spoiled(NLMS)["Tears"]), 30)


@pytest.mark.parametrize("name", FURTHER)
def test_the_documented_solver_goes_through_it_all(NLMS, name):
    FURTHER[name](Case(NLMS))


def test_a_solver_without_the_methods_is_told_so():
    with pytest.raises(AssertionError, match="Linear lacks some of them"):
        check_solver(lambda: nn.Linear(2, 1))


def test_wrong_arguments_are_named(NLMS):
    with pytest.raises(ValueError, match="task must be 'regression', 'classification' or 'labels', got 'ranking'"):
        check_solver(NLMS, task="ranking")
    with pytest.raises(ValueError, match=r"only must name checks, .*, got 'speed'"):
        check_solver(NLMS, only=["speed"])
