"""The options of the commands that read tables. An option is declared here alone: type, default, words, how it is read.

The command line, the configuration that is saved with a model and the report are built from these fields. The settings
of how a file is read are fields of `reading.Reading`.
"""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from sepsa.learner.columns.cells import CATEGORIES
from sepsa.shell.reading import SETTINGS, names, option

NO_TARGET = "--target must name the column to predict"


def number(text: str) -> float | str:
    """A number, or "auto"."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise ValueError(f"must be a number or auto, got {text!r}") from None


def periods(text: str) -> float | str | tuple[float | str, ...]:
    """Numbers with commas between, or "auto"."""
    return text if text == "auto" else tuple(number(part) for part in text.split(",") if part)


def limits(text: str) -> tuple[float | str | None, ...]:
    """Least and largest value with a comma between, None for one left out; a single number is the least."""
    parts = text.split(",") if "," in text else [text, ""]
    return tuple(number(part) if part.strip() else None for part in parts) if text else ()


def digits(text: str) -> int | str:
    """A number of significant digits, or "all"."""
    if text == "all" or (text.isdecimal() and 1 <= int(text) <= 17):
        return text if text == "all" else int(text)
    raise ValueError(f"must be a number from 1 to 17, or all, got {text!r}")


def step_in_words(text: str) -> float | str:
    """A number of seconds, or words."""
    return number(text) if text[:1].isdigit() else text


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
        min=1,
    )
    forgetting: float | str = option(
        "auto", "1: all rows count alike; 0.999: about the last 1,000; auto: several, by their errors.", read=number
    )
    ridge: float | str = option(10.0, "How strongly the weights of the head are pulled to zero.", read=number)
    loss: str = option("huber", "huber: implausible numbers are bounded; squared: all rows count fully.")
    seed: int = option(0, "Same rows and same seed, same numbers.", min=0)
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
    horizon: int = option(24, "How many rows ahead are forecast.", min=1)
    lags: int | str = option("auto", "Past rows that are inputs.", min=1)
    seasons: Any = option("auto", "Periods in rows, with commas between; else they are found.", read=periods)
    step: float | str | None = option(
        None, "Seconds between rows, or day, business day, week, month, ...; else it is found.", read=step_in_words
    )
    bounds: Any = option((None, None), "Least and largest value, as 0, or 0,100; else none.", read=limits)
    every: int = option(1, "Rows of a block: forecasts are made every so many rows, as 24 for day-ahead.", min=1)
    start: int = option(0, "Row of the day at which a block begins, counted from midnight.", min=0)


@dataclass(init=False)
class CommandOptions:
    """What a command was given: its table and its own options, and as `settings` and `reading` those of its model.

    `settings` and `reading` hold what was given alone: a checkpoint knows the rest.
    """

    source: Path | None = field(
        metadata={"help": "CSV (plain, gzip or zstd), JSON lines, Parquet or Arrow; - is standard input."}
    )
    predictions: Path | None = option(
        None, "A .csv for the predictions; else they are printed.", names=("--predictions", "--out")
    )
    digits: int | str | None = option(
        None, "Significant digits of written numbers, or all; else 6 of printed ones, and all in a file.", read=digits
    )
    model: ClassVar[type | None] = None  # has the options of the model
    prints: ClassVar[bool] = True  # whether predictions are printed where no file is named

    def __init__(self, source: Path | None, **given: Any) -> None:
        self.source, own = source, {each.name for each in fields(self)}
        self.reading = {name: given.pop(name) for name in SETTINGS if name in given}
        self.settings: dict[str, Any] = {}
        for name, value in given.items():
            if name in own:
                setattr(self, name, value)
            elif value not in (None, "", ()):
                self.settings[name] = value


@dataclass(init=False)
class DetailOptions(CommandOptions):
    """What may be written beside each prediction."""

    intervals: float | None = option(None, "Also write low and high, between which this share of targets lies, as 0.9.")
    probabilities: bool = option(False, "Also write the probability of each class, as a JSON object.")


@dataclass(init=False)
class RunOptions(CommandOptions):
    """The options of a command that learns."""

    follow: bool = option(False, "Wait for rows that are appended to the file.")
    quarantine: Path | None = option(None, "A .csv for rows that cannot be used.")
    checkpoint: Path | None = option(None, "Where the model is saved, and resumed from if it is there.")
    save_every: int = option(10_000, "Rows between two checkpoints.", min=1)
    keep: int = option(1, "How many checkpoints stay, the older as .1, .2, ...", min=1)
    force: bool = option(False, "Save a model with NaN or Inf over one without.")
    report: Path | None = option(None, "An .html page on what happened.")

    def names_target(self) -> bool:
        """Whether the target is given, or known by a checkpoint."""
        return bool(self.settings.get("target")) or (self.checkpoint is not None and self.checkpoint.exists())


@dataclass(init=False)
class StreamOptions(RunOptions, DetailOptions):
    """The options of `sepsa stream`."""

    model = TableOptions


@dataclass(init=False)
class ForecastOptions(RunOptions):
    """The options of `sepsa forecast`."""

    model, prints = SeriesOptions, False
    predictions: Path | None = option(None, "A .csv for the forecasts made after each row.")
    report: Path | None = option(None, "An .html page with the forecasts as fan charts.")
    quarantine: Path | None = option(Path(os.devnull), "A .csv for rows that cannot be used.")
