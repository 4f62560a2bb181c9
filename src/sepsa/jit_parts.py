"""Functions that only kernels call, compiled for that: nothing of them is translated outside the kernels."""

from __future__ import annotations

from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


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
        self.state.library = PartLibrary(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return super().define_pipelines()


# `PartLibrary` rests on the inside of numba, so it serves the releases with which it was tested. With others a part is
# compiled on its own as well, to the same code, and compilation takes about twice as long.
TESTED = ("0.68.",)


def for_parts(options: Any) -> Any:
    """The options of `njit` for such a function, from those of the kernels that call it."""
    own = options | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return own | ({"pipeline_class": PartCompiler} if numba.__version__.startswith(TESTED) else {})
