"""The commands and their options. An option is declared here alone: default, words, how it is read.

The command line, the configuration that is saved with a model and the report are built from these fields. The settings
of how a file is read are fields of `reading.Reading`.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from sepsa.learner.columns.cells import CATEGORIES
from sepsa.shell.reading import SETTINGS, Reading, names, option

NO_TARGET = "--target must name the column to predict"


def flag_of(name: str) -> str:
    """The option of a setting on the command line."""
    return f"--{name.replace('_', '-')}"


def whole(least: int) -> Callable[[str], int]:
    """A reader of integers."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return int(text)

    return read


def number(text: str) -> float | str:
    """A number, or words, such as "auto" or "month", which the model checks."""
    try:
        return float(text)
    except ValueError:
        return text


def periods(text: str) -> float | str | tuple[float | str, ...]:
    """Numbers with commas between, or "auto"."""
    return text if text == "auto" else tuple(number(part) for part in text.split(",") if part)


def limits(text: str) -> tuple[float | str | None, ...]:
    """Least and largest value with a comma between, None for one left out; a single number is the least."""
    least, _, most = text.partition(",")
    return tuple(number(part) if part.strip() else None for part in (least, most)) if text else ()


def digits(text: str) -> int | str:
    """A number of significant digits, or "all"."""
    if text == "all" or (text.isdecimal() and 1 <= int(text) <= 17):
        return text if text == "all" else int(text)
    raise ArgumentTypeError(f"must be a number from 1 to 17, or all, got {text!r}")


def path_or_stream(text: str) -> Path | None:
    """A path; None for the hyphen of standard input or output."""
    return None if text == "-" else Path(text)


def path(text: str) -> Path:
    """The path of a file or a folder."""
    if text == "-":
        raise ArgumentTypeError("must name a file or a folder, got -, which stands for standard output")
    return Path(text)


@dataclass(eq=False, repr=False)
class TableOptions:
    """The options of the model of `sepsa stream`, which are saved with it."""

    target: str = option("", "The column to predict; a checkpoint knows it already.")
    _: KW_ONLY
    classify: bool = option(False, "The target is a class, not a number.")
    drop: tuple[str, ...] = option((), "Columns to leave out, with commas between.", read=names)
    categorical: tuple[str, ...] = option((), "Columns of numbers that are names, such as postal codes.", read=names)
    categories: int = option(
        CATEGORIES,
        "How many texts of a column get an input each; all others share one, the mean target of a text.",
        read=whole(1),
    )
    forgetting: float | str = option(
        "auto", "1: all rows count alike; 0.999: about the last 1,000; auto: several, by their errors.", read=number
    )
    ridge: float | str = option(10.0, "How strongly the weights of the head are pulled to zero.", read=number)
    loss: str = option("huber", "huber: implausible numbers are bounded; squared: all rows count fully.")
    seed: int = option(0, "Same rows and same seed, same numbers.", read=whole(0))
    body: str = option(
        "experts", "experts: trees, neighbours and others beside the network; fourier: the network alone, faster."
    )


@dataclass(eq=False, repr=False)
class SeriesOptions:
    """The options of the model of `sepsa forecast`, which are saved with it."""

    target: tuple[str, ...] = option((), "The columns to forecast, with commas between.", read=names)
    _: KW_ONLY
    time: str | None = option(None, "The column of times: dates or seconds; rows left out are gaps.")
    inputs: tuple[str, ...] = option((), "Columns that help to forecast, with commas between.", read=names)
    known_ahead: bool = option(
        False, "Inputs are known ahead: rows at the end without a target have those of the rows to forecast."
    )
    horizon: int = option(24, "How many rows ahead are forecast.", read=whole(1))
    lags: int | str = option("auto", "Past rows that are inputs.", read=whole(1))
    seasons: Any = option("auto", "Periods in rows, with commas between; else they are found.", read=periods)
    step: float | str | None = option(
        None, "Seconds between rows, or day, business day, week, month, ...; else it is found.", read=number
    )
    bounds: Any = option((None, None), "Least and largest value, as 0, or 0,100; else none.", read=limits)
    every: int = option(
        1, "Rows of a block: forecasts are made every so many rows, as 24 for day-ahead.", read=whole(1)
    )
    start: int = option(0, "Row of the day at which a block begins, counted from midnight.", read=whole(0))


class Command:
    """The options of a command: its fields, or arguments where `place` says so."""

    runs: ClassVar[str]  # the function that takes them, behind its module in the shell

    @classmethod
    def declared(cls) -> list[Field[Any]]:
        """All its options."""
        return [*fields(cls)]  # type: ignore[arg-type]


def argument(words: str) -> Any:
    """A path that a command needs, which has no name there."""
    return field(metadata={"help": words, "read": path, "place": True})


@dataclass
class DemoOptions(Command):
    """Train the paper's network online on Diabetes with five methods at three learning rates. No download."""

    runs = "demo.run"
    seeds: int = option(3, "Runs per method and learning rate.", read=whole(1))


@dataclass
class ReportOptions(Command):
    """Write the page of a saved model: an .html that needs no network."""

    runs = "pages.report"
    model: Path = argument("What `sepsa stream` or `sepsa forecast` has saved.")
    out: Path = option(Path("report"), "The folder for the page.", read=path)


@dataclass
class InspectOptions(Command):
    """Show what a checkpoint contains, its age, and whether it is intact."""

    runs = "inspection.show"
    model: Path = argument("A checkpoint: of `sepsa stream`, or written by sepsa.save.")
    json: bool = option(False, "Print JSON, for a program to read.")


@dataclass(init=False)
class TableCommand(Command):
    """What a command was given: its table and its own options, and as `settings` and `reading` those of its model.

    `settings` and `reading` hold what was given alone: a checkpoint knows the rest.
    """

    source: Path | None = option(
        None,
        "CSV (plain, gzip or zstd), JSON lines, Parquet or Arrow; - is standard input.",
        read=path_or_stream,
        place=True,
    )
    predictions: Path | None = option(
        None,
        "A .csv for the predictions; else they are printed.",
        names=("--predictions", "--out"),
        read=path_or_stream,
    )
    digits: int | str | None = option(
        None, "Significant digits of written numbers, or all; else 6 of printed ones, and all in a file.", read=digits
    )
    saved: ClassVar[tuple[Field[Any], ...]] = ()  # the options of the model

    def __init__(self, source: Path | None = None, **given: Any) -> None:
        self.source = source
        self.reading = {name: given.pop(name) for name in SETTINGS if name in given}
        for name in {each.name for each in fields(self)} & given.keys():
            setattr(self, name, given.pop(name))
        self.settings = {name: value for name, value in given.items() if value not in (None, "", ())}

    @classmethod
    def declared(cls) -> list[Field[Any]]:
        return [*cls.saved, *super().declared(), *fields(Reading)]


@dataclass(init=False)
class DetailOptions(TableCommand):
    """What may be written beside each prediction."""

    intervals: float | None = option(
        None, "Also write low and high, between which this share of targets lies, as 0.9.", read=float
    )
    probabilities: bool = option(False, "Also write the probability of each class, as a JSON object.")


@dataclass(init=False)
class PredictOptions(DetailOptions):
    """Predict the rows of a table with a saved model, without learning them."""

    runs = "command.predict"
    model: Path = argument("What `sepsa stream --checkpoint` has saved.")


@dataclass(init=False)
class RunOptions(TableCommand):
    """The options of a command that learns."""

    follow: bool = option(False, "Wait for rows that are appended to the file.")
    quarantine: Path | None = option(None, "A .csv for rows that cannot be used.", read=path)
    checkpoint: Path | None = option(None, "Where the model is saved, and resumed from if it is there.", read=path)
    save_every: int = option(10_000, "Rows between two checkpoints.", read=whole(1))
    force: bool = option(False, "Save a model with NaN or Inf over one without.")
    report: Path | None = option(None, "An .html page on what happened.", read=path)

    def names_target(self) -> bool:
        """Whether the target is given, or known by a checkpoint."""
        return bool(self.settings.get("target")) or (self.checkpoint is not None and self.checkpoint.exists())


@dataclass(init=False)
class StreamOptions(RunOptions, DetailOptions):
    """Predict each row of a table as it comes, then learn it. Text becomes indicators, an empty cell is missing."""

    runs, saved = "command.stream", fields(TableOptions)


@dataclass(init=False)
class ForecastOptions(RunOptions):
    """Forecast columns of a table, learning each row as it comes; prints the forecast after the last row."""

    runs, saved = "forecast.forecast", fields(SeriesOptions)
    predictions: Path | None = option(None, "A .csv for the forecasts made after each row.", read=path)
    report: Path | None = option(None, "An .html page with the forecasts as fan charts.", read=path)
    quarantine: Path | None = option(Path(os.devnull), "A .csv for rows that cannot be used.", read=path)


COMMANDS: dict[str, type[Command]] = {
    "demo": DemoOptions,
    "report": ReportOptions,
    "stream": StreamOptions,
    "forecast": ForecastOptions,
    "predict": PredictOptions,
    "inspect": InspectOptions,
}
