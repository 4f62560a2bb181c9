"""How numba compiles the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from sepsa import candidates, restoration
from sepsa.jit import Kernel, cached

# The order of sums may change; NaN and Inf keep their meaning: a diverged body is recognized by them.
OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}


class PartLibrary(JITCodeLibrary):
    """The code of a function that only kernels call: it is optimized and translated inside each of them, not before."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        """Without machine code there is no place for an environment, by which code would reach Python objects."""
        return _NoEnvironment


class _NoEnvironment:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        pass


class PartCompiler(Compiler):
    """Numba's compiler for such functions: half of the time that compilation takes would go into code never called."""

    def define_pipelines(self) -> Any:
        self.state.library = PartLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        return super().define_pipelines()  # type: ignore[no-untyped-call]


# `PartLibrary` rests on the inside of numba, so it serves the releases with which it was tested. With others a part is
# compiled on its own as well, to the same code, and compilation takes about twice as long.
_TESTED = ("0.68.",)
_PART: Any = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
if numba.__version__.startswith(_TESTED):
    _PART["pipeline_class"] = PartCompiler
inlined = njit(forceinline=True, **_PART)
called = njit(**_PART)
compiled = cached(**OPTIONS)

_MODULES = (
    *(Path(__file__).parent, Path(__file__).parents[1] / "experts"),
    *(Path(module.__file__) for module in (restoration, candidates)),
)
_SIGNATURE = types.int64(types.CPointer(types.int64), types.int64)  # type: ignore[no-untyped-call]


def kernel(cost: float) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator for a function (model, index) -> integer that is called by its address; `cost` as in `Kernel`."""
    return lambda function: Kernel(function, _SIGNATURE, cost, _MODULES, OPTIONS)
