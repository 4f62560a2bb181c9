"""`python -IS start_preloaded.py SOCKET ARGUMENTS` is `python ARGUMENTS`, in a fork of the parent of preloaded.py."""

import contextlib
import json
import os
import signal
import socket
import sys

streams = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is not None]
with socket.socket(socket.AF_UNIX) as parent:
    parent.connect(sys.argv[1])
    words = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ), streams]).encode()
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
