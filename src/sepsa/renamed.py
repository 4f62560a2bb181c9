"""Old names of private modules, so that pickles of version 0.1 load. Kept for one version.

A pickle names the module of every class in it. `install` adds an import hook that answers an old module name with an
alias of the module that holds its classes now.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType

# Old module: the new one. A class with a new name has it in `CLASSES`, under (old module, old name), as "module:name"
# where it is in another module than its old neighbours.
MODULES = {
    "sepsa.heads.solver": "sepsa.heads.protocols",
    "sepsa.heads._candidates": "sepsa.heads.math.candidates",
    "sepsa.heads._delta": "sepsa.heads.base.delta",
    "sepsa.heads._health": "sepsa.heads.base.health",
    "sepsa.heads._quasi_newton": "sepsa.heads.math.quasi_newton",
    "sepsa.heads._softmax_newton": "sepsa.heads.math.cross_entropy",
    "sepsa.heads._square_root": "sepsa.heads.math.least_squares",
    "sepsa.heads.slimtik": "sepsa.paper.slimtik",
    "sepsa.heads._tikhonov": "sepsa.paper.slimtik",
    "sepsa.paper.slimtrain": "sepsa.paper.slimtik",
    "sepsa.stream.estimators": "sepsa.stream.sklearn",
    "sepsa.stream.experts.engine": "sepsa.stream.engine.compiled",  # until 0.2
    "sepsa.stream.experts.layout": "sepsa.stream.engine.layout",
    "sepsa.stream.torch_body": "sepsa.stream.engine.torch_body",
}
CLASSES: dict[tuple[str, str], str] = {
    ("sepsa.heads._quasi_newton", "State"): "LBFGSState",
    ("sepsa.heads._softmax_newton", "State"): "CrossEntropyState",
    ("sepsa.heads._square_root", "Root"): "RootOfVersion01",
    ("sepsa.heads.slimtik", "State"): "SlimTikState",
    ("sepsa.stream.experts.engine", "ExpertEngine"): "Engine",
    ("sepsa.stream.experts.layout", "ExpertLayout"): "Layout",
    ("sepsa.stream.torch_body", "TorchLearner"): "sepsa.stream.learner:StreamLearner",
}


class RenamedModules:
    """A finder and loader of modules by their old names: `sys.meta_path` asks it after all others."""

    def find_spec(self, name: str, *details: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module `module` with the classes of the one that replaced it."""
        new = importlib.import_module(MODULES[module.__name__])
        module.__dict__.update({name: value for name, value in vars(new).items() if not name.startswith("__")})
        for (old, name), value in CLASSES.items():
            if old == module.__name__:
                setattr(module, name, resolve_name(value) if ":" in value else getattr(new, value))


def install() -> None:
    """Let old module names be imported."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.append(RenamedModules())
