"""A `python` that starts at once: a parent imports torch and other packages, and each start is a fork of the parent.

Only other packages are preloaded: a program imports `sepsa` itself, as a reader's program does. In a program that is a
file, warnings are errors, as under `python -W error`.

`python preloaded.py SOCKET` is the parent, and `python -IS preloaded.py SOCKET ARGUMENTS` is `python ARGUMENTS`.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

MODULES = (
    "torch._dynamo", "sklearn.datasets", "pandas", "matplotlib.pyplot", "pyarrow.parquet", "rich.progress",
    "typer",
)  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
LIMIT = 600  # seconds of one program


@contextlib.contextmanager
def preloaded():
    """A folder with two executables, `python` and `sepsa`, for a test to start or to put on its PATH."""
    with tempfile.TemporaryDirectory(prefix="python-") as folder:
        address = f"{folder}/socket"
        for name, more in (("python", ""), ("sepsa", "-m sepsa ")):
            file = Path(folder, name)
            file.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} {address} {more}"$@"\n')
            file.chmod(0o700)
        command = [sys.executable, __file__, address]
        pipe, environment = subprocess.PIPE, ENVIRONMENT | os.environ
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as parent:
            assert parent.stdout.readline() == b"listening\n"
            yield Path(folder)


def serve(address):
    """Import the packages, then answer starts until the end of standard input, which is that of the tests."""
    for module in MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            __import__(module)
    gc.collect()
    gc.freeze()  # so that collections in forks do not copy the memory of the packages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("listening", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                listener.close()
                attend(connection)
            connection.close()
    os._exit(0)  # what the packages clean up takes seconds


def attend(connection):
    """Run the program in a child, tell its id and how it ended, and kill it if the process that asked for it ends."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        arguments, folder, environment, numbers = json.loads(file.read(int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        connection.close()
        leave(lambda: run(arguments, folder, environment, dict(zip(numbers, streams, strict=True))))

    def kill():
        connection.recv(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    connection.sendall(f"{pid}\n".encode())
    threading.Thread(target=kill, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def leave(program):
    """Run a program and end the process as the interpreter does, but for the memory, which takes seconds to free."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        code = 120
    os._exit(code)


def run(arguments, folder, environment, streams):
    """Be `python ARGUMENTS` with these files for its standard streams, of which some may be closed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(LIMIT)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in streams:
            os.dup2(streams[number], number)
            os.close(streams[number])
        else:
            os.close(number)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(ENVIRONMENT | environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    option, *rest = arguments
    if option == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option in ("-c", "-"):
        code = rest.pop(0) if option == "-c" else sys.stdin.read()
        sys.argv, sys.path[0] = [option, *rest], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(option).absolute().parent)
        warnings.simplefilter("error")
        runpy.run_path(option, run_name="__main__")


def start(address, arguments):
    """Ask the parent for a program, with the streams, the folder and the environment of this process, and end as it."""
    streams = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is not None]
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(address)
        words = json.dumps([arguments, os.getcwd(), dict(os.environ), streams]).encode()
        socket.send_fds(parent, [len(words).to_bytes(8, "big")], streams)
        parent.sendall(words)
        with parent.makefile("r") as told:
            pid = int(told.readline())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _: os.kill(pid, number))
            status = int(told.readline())
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2:]) if sys.argv[2:] else serve(sys.argv[1])
