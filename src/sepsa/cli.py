"""The command line: `sepsa demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

NEEDS_EXTRA = "the command line needs {missing}, which is not installed: pip install 'sepsa[paper]'"

try:
    import typer
except ModuleNotFoundError as error:  # the core is torch and numpy alone
    sys.exit(NEEDS_EXTRA.format(missing=error.name))

app = typer.Typer(
    help="Train models with a linear head: the head by a stochastic Newton method, the body as before.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def sepsa() -> None:
    """Train models with a linear head: the head by a stochastic Newton method, the body as before."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure goes: .png, .svg or .pdf.")] = Path("demo.png"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method and learning rate.")] = 3,
) -> None:
    """Train the paper's network online on Diabetes with five methods at three learning rates. No download."""
    try:
        from sepsa.paper import demo as demonstration
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sepsa":
            raise
        sys.exit(NEEDS_EXTRA.format(missing=error.name))
    demonstration.run(out, seeds)


def main() -> None:
    app()
