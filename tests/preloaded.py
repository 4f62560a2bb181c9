"""Python programs in processes of their own without an import of torch in each: a parent imports it once and forks.

Only other packages are preloaded: the program imports `sepsa` itself, as a reader's program does.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LIMIT = 600  # seconds of one program


class Finished(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def preloaded(*modules):
    """A function that runs a Python file in a folder as `python -W error` would, in a fork of one parent.

    It returns how the program ended, or with `wait=False`, while it runs, the id of its process.
    """
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
    )  # fmt: skip

    def run(program, folder, wait=True):
        parent.stdin.write(json.dumps([str(program), str(folder), wait]) + "\n")
        parent.stdin.flush()
        told = json.loads(parent.stdout.readline())
        return Finished(*told) if wait else told

    with parent:
        yield run


def fork(program, folder, wait):
    """Run the program in a child; the child leaves this function, and the interpreter, as `python program` would."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIMIT)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
                os.dup2(source, target)
            os.chdir(folder)
            sys.argv, sys.path[0] = [program], str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
            sys.exit()
        if not wait:
            return pid
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Finished(status, *(file.seek(0) or file.read() for file in (out, err)))


if __name__ == "__main__":
    for module in sys.argv[1:]:
        __import__(module)
    if "numba" in sys.argv:
        sys.modules["numba"].njit(lambda: None)()  # the first call of a compiled function imports most of numba
    for line in sys.stdin:
        print(json.dumps(fork(*json.loads(line))), flush=True)
