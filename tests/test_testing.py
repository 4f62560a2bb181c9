"""The battery passes the solver that docs/solvers.md writes, and fails broken ones, each for its own reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sepsa import SepSA
from sepsa.heads import Capturable, HeadSolver
from sepsa.testing import CHECKS, check_solver

DOCUMENT = Path(__file__).parents[1] / "docs" / "solvers.md"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The document's blocks of code, the first written to the file it names and importable."""
    text = DOCUMENT.read_text()
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    name = re.search(r"<!-- file: (\w+\.py) -->", text).group(1)
    folder = tmp_path_factory.mktemp("documented")
    (folder / name).write_text(code[0])
    sys.path.insert(0, str(folder))
    yield code
    sys.path.remove(str(folder))
    sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture
def NLMS(blocks):
    import nlms

    return nlms.NLMS


def test_the_documented_solver_is_short_and_keeps_both_protocols(blocks, NLMS):
    written = [line for line in blocks[0].splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(written) <= 80  # of at most 88 characters
    assert isinstance(NLMS(), HeadSolver)
    assert isinstance(NLMS(), Capturable)


@pytest.mark.parametrize("check", CHECKS)
def test_the_documented_solver_passes(NLMS, check):
    check_solver(NLMS, only=[check])


def test_the_documents_own_lines_run(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(blocks) == 3
    for code in blocks[1:]:
        exec(compile(code, str(DOCUMENT), "exec"), {})


def test_the_document_names_every_check():
    table = re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert table == list(CHECKS)


# ---------------------------------------------------------------------- broken in one way each


def broken(base, **methods):
    """A solver like `base` with some methods of its own, and the module's name so that copies find it."""

    class Broken(base):
        def __reduce_ex__(self, protocol):
            return _revive, (type(self), dict(self.__dict__))

    for name, method in methods.items():
        setattr(Broken, name, method)
    return Broken


def _revive(kind, attributes):
    solver = kind.__new__(kind)
    solver.__dict__.update(attributes)
    return solver


def learns_nothing(base):
    return broken(base, _write=lambda self, new: self.steps.add_(1))


def learns_before_it_looks(base):
    def update(self, features, targets, sample_weight=None):
        with torch.no_grad():
            self.linear.weight.add_(1e-3)
        base.update(self, features, targets, sample_weight)

    return broken(base, update=update)


def swallows_nan(base):
    def update(self, features, targets, sample_weight=None):
        from sepsa import NotFinite

        try:
            base.update(self, features, targets, sample_weight)
        except NotFinite:
            return

    return broken(base, update=update)


def tears(base):
    @torch.no_grad()
    def write(self, new):
        for old, value in zip(self._tensors(), new, strict=True):
            old.copy_(value)  # without commit

    return broken(base, _write=write)


def keeps_a_part_of_its_state_back(base):
    def update(self, features, targets, sample_weight=None):
        self.calls = getattr(self, "calls", 0) + 1  # in no state
        weight = features.new_full(features.shape[:-1], 1 / self.calls)
        base.update(self, features, targets, weight if sample_weight is None else sample_weight)

    return broken(base, update=update)


def shares_its_state(base):
    return broken(base, state_dict=lambda self: base.state_dict(self) | {"steps": self.steps})


def loads_in_pieces(base):
    def load_state_dict(self, state_dict):
        self.steps = torch.zeros_like(self.steps)
        base.load_state_dict(self, state_dict)

    return broken(base, load_state_dict=load_state_dict)


def takes_any_head(base):
    def bind(self, linear):
        self.linear = None
        return base.bind(self, linear)

    return broken(base, bind=bind)


def sums_its_loss(base):
    return broken(base, loss=lambda self, outputs, targets: (outputs - targets).square().sum())


def captures_something_else(base):
    def update_captured(self, features, targets):
        return base.update_captured(self, features, 2 * targets)

    return broken(base, update_captured=update_captured)


def captured_nan_goes_in(base):
    @torch.no_grad()
    def update_captured(self, features, targets):
        new, fine = self._learned(features, targets)
        self._write(new)
        return fine

    return broken(base, update_captured=update_captured)


def rolls_back_the_head_alone(base):
    def rollback(self, token):
        with torch.no_grad():
            self.linear.weight.copy_(token)

    return broken(base, checkpoint=lambda self: self.linear.weight.detach().clone(), rollback=rollback)


def overflows(base):
    def learned(self, features, targets, sample_weight=None):
        new, _ = base._learned(self, features, targets, sample_weight)
        return new, bool(features.isfinite().all() & targets.isfinite().all())

    return broken(base, _learned=learned)


BROKEN = {
    "learns": (learns_nothing, r"promised: after 300 batches .* within 0\.01 of the truth .*; but they are"),
    "bad input": (
        learns_before_it_looks,
        r"promised: NaN in the features changes nothing; but it changed head\.weight",
    ),
    "bad input, silent": (swallows_nan, "promised: NaN in the features raises NotFinite; but nothing was raised"),
    "interrupts": (tears, r"promised: an update interrupted at any instant .*; but \d+ of \d+ interrupts tore it"),
    "copies": (keeps_a_part_of_its_state_back, r"promised: a checkpoint goes on bit for bit; but head\.\w+ differs"),
    "copies, shared": (shares_its_state, "promised: states are copies both ways; but writing into one changed"),
    "wrong states": (loads_in_pieces, r"promised: a state .* is refused whole; but it changed solver\.steps"),
    "one head": (takes_any_head, "promised: bind to a second head raises ValueError; but nothing was raised"),
    "loss": (sums_its_loss, "promised: loss is a mean over samples; but it is"),
    "captured": (captures_something_else, "promised: update_captured learns what update does; but the head's weight"),
    "captured, NaN": (captured_nan_goes_in, "promised: NaN in features changes nothing in update_captured"),
    "rollback": (rolls_back_the_head_alone, r"promised: rollback\(checkpoint\(\)\) undoes updates bit for bit; but"),
    "too large": (overflows, "promised: .* on a float16 head are refused as NotFinite, or everything stays finite"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_solver_fails_for_its_own_reason(NLMS, name):
    spoil, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_solver(spoil(NLMS), only=[name.partition(",")[0]], interrupts=60)


def test_a_solver_without_the_methods_is_told_so():
    with pytest.raises(AssertionError, match="Linear lacks some of them"):
        check_solver(lambda: nn.Linear(2, 1))


def test_wrong_arguments_are_named(NLMS):
    with pytest.raises(ValueError, match="task must be 'regression', 'classification' or 'labels', got 'ranking'"):
        check_solver(NLMS, task="ranking")
    with pytest.raises(ValueError, match=r"only must name checks, .*, got 'speed'"):
        check_solver(NLMS, only=["speed"])


def test_a_solver_may_call_its_head_inside_observe(NLMS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = SepSA(model, torch.optim.SGD, solver=NLMS(), lr=0.1)
    optimizer.learn(torch.randn(8, 3), torch.randn(8, 2))
    assert optimizer.solver.steps == 1
