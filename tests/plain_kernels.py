"""Kernels as plain Python: arrays know their ends, and a changed kernel is tested without compiling it.

Python and NumPy alone do the arithmetic, so that only small tests are quick enough. As a plugin of pytest,
`-p plain_kernels`, it runs all kernels so.
"""

import contextlib
import ctypes

import numpy as np

from sepsa.compiled import code
from sepsa.compiled.kernels import CALL
from sepsa.forecast import model

WORDS = ctypes.POINTER(ctypes.c_int64)  # as a kernel gets its model


@contextlib.contextmanager
def plain_kernels():
    """Let kernels run as plain Python; in the end the first error in one of them is raised."""
    callbacks, errors, compiled = {}, [], code.address

    def address(kernel):
        def run(place, index):
            try:
                with np.errstate(all="ignore"):  # kernels are compiled with NumPy's rules for errors
                    return int(kernel(ctypes.cast(ctypes.c_void_p(place), WORDS), index))
            except BaseException as error:  # which C would swallow
                errors.append(error)
                return 0

        if kernel not in callbacks:
            callbacks[kernel] = CALL(run)
        return ctypes.cast(callbacks[kernel], ctypes.c_void_p).value

    code.address = address
    model.function.cache_clear()
    try:
        yield
    finally:
        code.address = compiled
        model.function.cache_clear()
        if errors:
            raise errors[0]


def pytest_configure(config):
    plain = plain_kernels()
    plain.__enter__()
    config.add_cleanup(lambda: plain.__exit__(None, None, None))
