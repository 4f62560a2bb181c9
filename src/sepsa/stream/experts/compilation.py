"""How numba compiles the experts: functions that kernels call, and kernels that Python calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numba import njit
from numba.core import cgutils
from numba.extending import intrinsic

from sepsa.jit import cached
from sepsa.stream.engine import kernels
from sepsa.stream.engine.kernels.compilation import OPTIONS

called = njit(**OPTIONS)
compiled = cached(Path(kernels.__file__).parent, **OPTIONS)


@intrinsic
def borrowed(_: Any, array: Any) -> Any:
    """The same array without a reference counter, for kernels whose caller holds it while they run.

    A view of an array counts a reference, by an atomic operation that takes as long as ten sums.
    """

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        view = context.make_array(array)(context, builder, arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)  # type: ignore[no-untyped-call]
        return view._getvalue()

    return array(array), code
