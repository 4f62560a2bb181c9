"""The command line: `sepsa demo`, `stream`, `predict`, `forecast`, `report`, `inspect`.

Exit codes: 0 done; 1 the data, a file or the system stopped it; 2 the command is wrong; 3 more than a twentieth of the
rows was left out; 4 a table to forecast is newest first; 130 Ctrl-C; 143 SIGTERM; 141 the reader of the output has
closed it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from sepsa.shell.options import (
    NO_TARGET,
    CommandOptions,
    DetailOptions,
    ForecastOptions,
    RunOptions,
    StreamOptions,
)
from sepsa.shell.reading import Reading
from sepsa.validation import printable

NEEDS_EXTRA = "the command line needs {missing}, which is not installed: pip install 'sepsa[{extra}]'"

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as error:  # the core is torch and numpy alone
    sys.exit(NEEDS_EXTRA.format(missing=error.name, extra="stream"))


class QuickHelp:
    """A mixin: whether help is asked for is False where it is not, or typer converts None and imports pydantic."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option


class Commands(QuickHelp, TyperGroup):
    """The group of all commands."""


class OneLineErrors(QuickHelp, TyperCommand):
    """A command whose errors about its options are one line."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        try:
            return super().make_context(*given, **more)
        except USAGE_ERROR as error:
            words = " ".join(error.format_message().split()).rstrip(".")
            raise refuse(f"{words}: see sepsa {self.name} --help") from None


USAGE_ERROR: Any = typer.BadParameter.__base__  # click's, of which typer may have its own copy
# Without rich, whose import takes three times as long as all else that help and errors of usage need.
app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
add_command = partial(app.command, cls=OneLineErrors)

STREAM = Path("-")  # standard input or output
EXIT_CODES = (
    "Exit codes: 0 done; 1 stopped by the data, a file or the system; 2 a wrong command; 3 done, but more than a "
    "twentieth of the rows was left out; 4 a table for sepsa forecast is newest first; 130 Ctrl-C; 143 SIGTERM."
)


def parameter(each: Field[Any], hint: Any, given: bool) -> Parameter:
    """An option of the command line for a field of a dataclass; None where only what was `given` matters."""
    more, (kind, *other) = dict(each.metadata), get_args(hint) or (hint,)
    words, flags = more.pop("help"), more.pop("names", [f"--{each.name.replace('_', '-')}"])
    if given and each.default != "" and type(each.default) in (str, float, int):
        words += f" (default {each.default if isinstance(each.default, str) else f'{each.default:g}'})"
    kind = str if more.pop("read", None) else kind
    option = typer.Option(*flags, help=words, show_default=not given, **more)
    default, optional = (None, True) if given else (each.default, NoneType in other)
    annotation = Annotated[kind | None if optional else kind, option]  # type: ignore[valid-type]
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose argument `options` is read from the command line, by the fields that declare its options."""
    own = dict(signature(command, eval_str=True).parameters)
    kind: type[CommandOptions] = own.pop("options").annotation
    table = Annotated[Path, typer.Argument(help=fields(kind)[0].metadata["help"])]
    parameters = [*own.values(), Parameter("source", Parameter.KEYWORD_ONLY, default=STREAM, annotation=table)]
    readers: dict[str, Any] = {}
    for declared in filter(None, (kind.model, kind, Reading)):
        hints = get_type_hints(declared)
        for each in fields(declared):
            if each.name != "source":
                parameters.append(parameter(each, hints[each.name], declared is not kind))
                readers[each.name] = each.metadata.get("read")

    @wraps(command)
    def with_options(*, source: Path, **given: Any) -> None:
        passed = {name: given.pop(name) for name in own}
        options = {name: value for name, value in given.items() if value is not None}
        for name, read in readers.items():
            try:
                options |= {name: read(options[name])} if read and name in options else {}
            except ValueError as error:
                raise refuse(f"--{name.replace('_', '-')} {error}") from None
        if kind.prints and options.get("predictions") == STREAM:
            del options["predictions"]
        for name, value in options.items():
            refuse_stream(f"--{name.replace('_', '-')}", value)
        given_options = kind(None if source == STREAM else source, **options)
        if isinstance(given_options, RunOptions) and not given_options.names_target():  # before the large imports
            raise refuse(NO_TARGET)
        command(**passed, options=given_options)

    with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def print_version(wanted: bool) -> None:
    if wanted:
        from sepsa import __version__

        typer.echo(f"sepsa {__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def sepsa(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Train models with a linear head: the head by a stochastic Newton method, the body as before."""


@contextmanager
def extras(extra: str = "shell") -> Iterator[None]:
    """Convert the error for a missing package into one line that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "sepsa":
            raise
        needed = {"sklearn": "stream", "torch": "torch"}.get(missing, extra)
        raise stopped(NEEDS_EXTRA.format(missing=missing, extra=needed)) from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Convert an error of the operating system about a file or a folder into one line."""
    try:
        yield
    except OSError as error:
        own = f"{error.filename}: {(error.strerror or '').lower()}: check the path and its permissions"
        raise stopped(own if error.filename else str(error)) from None


def stopped(message: object, code: int = 1) -> typer.Exit:
    """Print one line on what stopped the command; returns the exception to raise."""
    typer.echo(printable(str(message)), err=True)
    return typer.Exit(code)


refuse = partial(stopped, code=2)  # for a command that is wrong


def refuse_stream(option: str, path: Any) -> None:
    """Stop where an option that names a file or a folder is the "-" of standard output."""
    if path == STREAM:
        raise refuse(f"{option} must name a file or a folder, got -, which stands for standard output")


@add_command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method and learning rate.")] = 3,
) -> None:
    """Train the paper's network online on Diabetes with five methods at three learning rates. No download."""
    with extras("demo"):
        from sepsa.shell import demo as demonstration
    demonstration.run(seeds)


@add_command()
def report(
    model: Annotated[Path, typer.Argument(help="What `sepsa stream` or `sepsa forecast` has saved.")],
    out: Annotated[Path, typer.Option(help="The folder for the page.")] = Path("report"),
) -> None:
    """Write the page of a saved model: an .html that needs no network."""
    with extras():
        import jinja2  # noqa: F401

        from sepsa.shell import forecast, inspection, output
    refuse_stream("--out", out)
    if model.is_dir():
        raise refuse(f"{model} is a folder: give a saved model")

    def write() -> int:
        found, header = inspection.load_model(model, "sepsa stream", "sepsa forecast")
        out.mkdir(parents=True, exist_ok=True)
        page = out / f"{model.stem}.html"
        if header.kind == "sepsa forecast":
            forecast.write_page(page, str(model), found)
        else:
            lost = header.position.get("quarantine") if isinstance(header.position, dict) else None
            inspection.write_report(page, str(model), found, Path(lost[0] if lost else os.devnull))
        output.say(f"the page is {page}")
        return output.FINISHED

    raise typer.Exit(output.exit_code(write))


@add_command(epilog=EXIT_CODES)
@takes_options
def stream(options: StreamOptions) -> None:
    """Predict each row of a table as it comes, then learn it. Text becomes indicators, an empty cell is missing."""
    with extras():
        from sepsa.shell import command

        if options.report is not None:
            import jinja2  # noqa: F401  # the report needs it, after all rows were learned
    raise typer.Exit(command.stream(options))


@add_command(epilog=EXIT_CODES)
@takes_options
def forecast(options: ForecastOptions) -> None:
    """Forecast columns of a table, learning each row as it comes; prints the forecast after the last row."""
    with extras():
        from sepsa.shell import command
        from sepsa.shell import forecast as forecasting
    raise typer.Exit(command.stream(options, forecasting.ForecastRun))


@add_command(epilog=EXIT_CODES)
@takes_options
def predict(
    model: Annotated[Path, typer.Argument(help="What `sepsa stream --checkpoint` has saved.")], options: DetailOptions
) -> None:
    """Predict the rows of a table with a saved model, without learning them."""
    with extras():
        from sepsa.shell import command
    raise typer.Exit(command.predict(model, options))


@add_command(epilog=EXIT_CODES)
def inspect(
    model: Annotated[Path, typer.Argument(help="A checkpoint: of `sepsa stream`, or written by sepsa.save.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a program to read.")] = False,
) -> None:
    """Show what a checkpoint contains, its age, and whether it is intact."""
    with extras():
        from sepsa.shell import inspection, output

    def show() -> int:
        output.check_stdout("open it, or redirect it to a file")
        contents = inspection.inspect(model)
        width = max(map(len, contents))
        lines = [f"{name:<{width}}  {plain(value)}\n" for name, value in contents.items()]
        output.print_text(json.dumps(contents, default=str) + "\n" if as_json else "".join(lines))
        return output.FINISHED

    raise typer.Exit(output.exit_code(show))


def plain(value: Any) -> str:
    """A value of `inspect` in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(str, value[:12]))
        return f"{shown}, ... ({len(value)})" if len(value) > 12 else shown or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the command line, also where the shell has closed a standard stream, as `2>&-` does."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # it takes the stream's number, which no other file may get
            if name != "stdin":  # whose absence is an error that a command reports
                setattr(sys, name, open(null, "w"))  # noqa: SIM115
    app()
