"""The command line: `sepsa demo`, `stream`, `predict`, `forecast`, `report`, `inspect`.

Exit codes: 0 done; 1 the data, a file or the system stopped it; 2 the command is wrong; 3 more than a twentieth of the
rows was left out; 4 a table to forecast is newest first; 130 Ctrl-C; 143 SIGTERM; 141 the reader of the output has
closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field
from importlib import import_module
from typing import Any, NoReturn

from sepsa._version import __version__
from sepsa.shell.messages import Misuse, exit_code
from sepsa.shell.options import COMMANDS, NO_TARGET, RunOptions, flag_of
from sepsa.validation import needs_extra

EXIT_CODES = (
    "Exit codes: 0 done; 1 stopped by the data, a file or the system; 2 a wrong command; 3 done, but more than a "
    "twentieth of the rows was left out; 4 a table for sepsa forecast is newest first; 130 Ctrl-C; 143 SIGTERM."
)


EXTRAS = {"demo": "demo", "forecast": "shell,stream", "inspect": "shell,torch"}  # of the others it is `shell`


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose options a class declares; what was not given is not in its result."""

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(f"sepsa {name}", f"sepsa {name} [OPTIONS]", kind.__doc__, EXIT_CODES, allow_abbrev=False)
        self.flags: dict[str, str] = {}  # the help of each option
        self.valued: set[str] = set()  # options with a value
        for each in sorted(kind.declared(), key=lambda each: each.default is not MISSING):
            self._declare(each)

    def _declare(self, each: Field[Any]) -> None:
        words, default = each.metadata["help"], each.default
        if type(default) in (str, int, float) and default != "":
            words += f" (default {default})"
        how: dict[str, Any] = {"help": words.replace("%", "%%")}
        if "place" in each.metadata:
            self.usage = f"{self.usage} {each.name.upper()}"
            self.add_argument(each.name, nargs=None if default is MISSING else "?", type=each.metadata["read"], **how)
            return
        flags = each.metadata.get("names", (flag_of(each.name),))
        how["default"] = argparse.SUPPRESS
        if default is False:
            how["action"] = "store_true"
        else:
            how |= {"type": each.metadata.get("read"), "metavar": "VALUE"}
            self.valued |= {*flags}
        self.flags[flags[0]] = words
        self.add_argument(*flags, dest=each.name, **how)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """What was given; a value may begin with a hyphen, as -999."""
        rest = iter(words)
        joined = [f"{word}={next(rest, '')}" if word in self.valued else word for word in rest]
        return vars(self.parse_intermixed_args(joined))

    def error(self, message: str) -> NoReturn:
        what, _, words = message.removeprefix("argument ").partition(": ")
        wrong = message.startswith("argument ")  # a value, else the usage
        raise Misuse(f"{what} {words}" if wrong else f"{message}: see {self.prog} --help")


def run(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    name, *rest = words or ["--help"]
    if name == "--version":
        print(f"sepsa {__version__}")
    elif name in ("-h", "--help"):
        told = [f"  {name:<10}{kind.__doc__}" for name, kind in COMMANDS.items()]
        print("usage: sepsa [--version] COMMAND ...\n", *told, "", EXIT_CODES, sep="\n")
    elif name not in COMMANDS:
        raise Misuse(f"{name} is not one of the commands {', '.join(COMMANDS)}: see sepsa --help")
    else:
        options = COMMANDS[name](**Parser(name, COMMANDS[name]).read(rest))
        if isinstance(options, RunOptions) and not options.names_target():  # before the large imports
            raise Misuse(NO_TARGET)
        with needs_extra("the command line", EXTRAS.get(name, "shell")):
            module, _, function = options.runs.partition(".")
            return getattr(import_module(f"sepsa.shell.{module}"), function)(options)
    return 0 if words else 2


def main() -> None:
    """Run the command line, also where the shell has closed a standard stream, as `2>&-` does."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # it takes the stream's number, which no other file may get
            if name != "stdin":  # whose absence is an error that a command reports
                setattr(sys, name, open(null, "w"))  # noqa: SIM115
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
