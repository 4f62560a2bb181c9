"""A command of sepsa in this process: its exit code, and what it wrote."""

import io
import sys
from typing import NamedTuple
from unittest import mock

from sepsa.shell import cli
from sepsa.shell.messages import exit_code


class Result(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self):
        return self.stdout + self.stderr


def invoke(words, text=""):
    """Run a command with this text as its standard input."""
    into, out, said = (
        io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="", write_through=True)
        for data in (text.encode(), b"", b"")
    )
    with mock.patch.multiple(sys, stdin=into, stdout=out, stderr=said):
        code = exit_code(lambda: cli.run([str(word) for word in words]))
    return Result(code, *(stream.buffer.getvalue().decode() for stream in (out, said)))
