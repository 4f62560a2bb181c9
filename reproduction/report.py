"""`python -m reproduction report`: the paper's table and figures beside ours, drawn from the records under results/.

Each call makes everything again from the records, and equal records give equal bytes. The same tables go to the page
and to the markdown file.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import product
from pathlib import Path
from typing import NamedTuple

import jinja2

from reproduction import figures, table3
from reproduction.captions import CaptionedFigure, draw
from reproduction.data import NAMES, TITLES
from reproduction.experiments import CLASSIFICATION_SEEDS, EXPERIMENTS, FIGURES, MODES, REGRESSION_SEEDS, TABLES, plan
from reproduction.formatting import against, judge, mean_and_std, number, plural, seconds
from reproduction.methods import slug
from reproduction.records import missing as not_recorded
from reproduction.records import write as write_file

HEADINGS = {name: experiment.heading for name, experiment in EXPERIMENTS.items()} | {"convergence": "Convergence"}
FIGURE_TITLES = {name: EXPERIMENTS[name].title for name in FIGURES}
FIGURE_TITLES["convergence"] = "Theorem 1, and the cost of a step"
IMAGES = tuple(name for name in TABLES if name != "table3")
COMPARED = tuple(name for name in IMAGES if EXPERIMENTS[name].compared)
PAPER_SEEDS = {"mse": len(REGRESSION_SEEDS), "accuracy": len(CLASSIFICATION_SEEDS)}
MODE_TITLES = {"online": "Online: one sample at a time, one pass", "mini-batch": "Mini-batches"}
COMMAND = "python -m reproduction run"
BEGIN, END = "<!-- table3 begin -->", "<!-- table3 end -->"
BESIDE = ("train, paper", "ours", "", "test, paper", "ours", "", "seeds", "seconds, paper", "ours")
MARKS = (
    "Mean squared error on Energy and Diabetes, accuracy in percent on MNIST and CIFAR-10; ± is the standard "
    "deviation over seeds (ours of the sample, n − 1), σ the one that the paper prints. ≈ within one σ, △ ▽ within "
    "two, ▲ ▼ beyond, pointing up where ours is better. ★ best test result of all our rows for that data set and mode."
)

Best = set[tuple[str, str, str]]  # mode, data set, method


class ReportRow(NamedTuple):
    """A row of a table in words; `record` is the file with its runs, without its suffix."""

    dataset: str
    method: str
    best: bool
    record: str
    cells: tuple[str, ...]


class ReportTable(NamedTuple):
    """A table with a column for each of `head`, behind the data set and the method."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: list[ReportRow]


def write(results: Path, out: Path, docs: Path | None = None) -> None:
    """Write the table, the figures and the page from the records under `results`.

    They go to `results/table3.json` and `images.json`, `out/figures/` and `out/report.html`; `docs` is a markdown file
    whose block between the marks "table3 begin" and "table3 end" is replaced. Runs that are missing are listed with the
    commands that make them.
    """
    if not results.is_dir():
        cure = f"run `{COMMAND} all`"
        raise FileNotFoundError(f"results must be a folder of records, got {str(results)!r}: {cure}")
    page = docs.read_text(encoding="utf-8") if docs is not None else ""
    if docs is not None and not 0 <= page.find(BEGIN) < page.find(END):
        raise ValueError(f"docs must hold the lines {BEGIN} and {END}, got {str(docs)!r} without them: write them in")
    records = table3.read(results)
    rows, images = table3.table3(records), table3.table3(records, IMAGES)
    for file, table in (("table3", rows), ("images", images)):
        text = json.dumps([asdict(row) for row in table], indent=1, allow_nan=False)
        write_file(results / f"{file}.json", text + "\n")
    drawn = draw(records, results / "convergence.json")
    for file, figure in drawn.items():
        figures.save(figure.figure, out / "figures" / f"{file}.svg")
        figure.figure.set_layout_engine("none")  # keep the layout: computing it again takes longer than drawing
        figures.save(figure.figure, out / "figures" / f"{file}.png")
    found, remarks, gaps = tables(rows, images), differences(rows, images), missing(results, records)
    write_file(out / "report.html", html(found, remarks, gaps, drawn, notes(records), out, relative(results, out)))
    if docs is not None:
        before, after = page[: page.find(BEGIN) + len(BEGIN)], page[page.find(END) :]
        write_file(docs, f"{before}\n{markdown(found, remarks, gaps, relative(results, docs.parent))}\n{after}")


def relative(results: Path, folder: Path) -> str:
    """The path of the results as a link in a page of this folder."""
    return Path(os.path.relpath(results, folder)).as_posix()


def missing(results: Path, records: Iterable[table3.Record]) -> dict[str, str]:
    """The runs that are not recorded, in words, and the commands that make them; of quick runs where all are quick."""
    quick = {bool(run.spec.get("quick")) for record in records for run in record.runs} == {True}
    option = " --quick" if quick else ""
    gaps = {}
    for experiment in EXPERIMENTS:
        wanted = plan(experiment, quick=quick)
        lacking = not_recorded(results, wanted)
        if len(lacking) == len(wanted):
            gaps[HEADINGS[experiment]] = f"{COMMAND} {experiment}{option}"
            continue
        for dataset in NAMES:
            here = [run for run in lacking if run.dataset == dataset]
            if not here:
                continue
            methods = [method for method in table3.METHODS if any(run.method == method for run in here)]
            all_methods = len(methods) == len({run.method for run in wanted if run.dataset == dataset})
            of = "all methods" if all_methods else "; ".join(methods)
            options = f" --datasets {dataset}" + ("" if all_methods else f" --methods {','.join(map(slug, methods))}")
            what = f"{HEADINGS[experiment]}, {TITLES[dataset]}: {plural(len(here), 'run')} of {of}"
            gaps[what] = f"{COMMAND} {experiment}{options}{option}"
    if not (results / "convergence.json").exists():
        gaps[HEADINGS["convergence"]] = f"{COMMAND} convergence{option}"
    return gaps


def notes(records: Iterable[table3.Record]) -> list[str]:
    """Remarks on the records: how many runs are quick ones, and what was noted about their data."""
    runs = [run for record in records for run in record.runs]
    quick = sum(bool(run.spec.get("quick")) for run in runs)
    few = (
        [f"{quick} of {plural(len(runs), 'run')} are quick ones, with fewer seeds, epochs and images."] if quick else []
    )
    return few + list(dict.fromkeys(run.note for run in runs if run.note))


# ---------------------------------------------------------------------- the tables


def tables(rows: Sequence[table3.TableRow], images: Sequence[table3.TableRow]) -> list[ReportTable]:
    """Table III and its variants beside the paper's numbers, then the rows that the paper lacks, against SepSA's."""
    best = table3.best_methods(rows)
    found = [_beside_paper(MODE_TITLES[mode], "", [row for row in rows if row.mode == mode], best) for mode in MODES]
    for experiment, mode in product(COMPARED, MODES):
        compared = [row for row in images if (row.experiment, row.mode) == (experiment, mode)]
        record = EXPERIMENTS[experiment]
        found.append(_beside_paper(f"{record.title}, {mode}", record.text, compared, best))
    tuned = []
    for experiment in IMAGES:
        if experiment not in COMPARED:
            some = [row for row in images if row.experiment == experiment]
            note = ", crops and flips" if EXPERIMENTS[experiment].crops_and_flips else ""
            some.sort(key=lambda row: NAMES.index(row.dataset))
            tuned += [_against_sepsa(row, table3.best_methods(some), (), note) for row in some]
    text = "A learning rate that falls to zero for all; six settings tried for each method on 5,000 images held out."
    head = ("train", "test", "test against SepSA, printed", "seeds", "seconds")
    found.append(ReportTable("Images with tuned settings", text, head, tuned))
    sepsa = {(row.mode, row.dataset): row.test_mean for row in rows if row.method == "SepSA"}
    more = [row for row in rows if row.paper_test_mean is None]
    extra = [_against_sepsa(row, best, (sepsa.get((row.mode, row.dataset)),)) for row in more]
    text = "An error is a multiple of SepSA’s at the paper’s settings, an accuracy the points above or below it."
    both = ("train", "test", "test against SepSA, ours", "against SepSA, printed", "seeds", "seconds")
    found.append(ReportTable("Methods that the paper does not compare", text, both, extra))
    return [table for table in found if table.rows]


def _beside_paper(title: str, text: str, rows: Iterable[table3.TableRow], best: Best) -> ReportTable:
    """Our rows beside those that the paper prints."""
    found = []
    for row in rows:
        if printed := table3.compared_row(row):
            train, test = _cells(row)
            paper_train = mean_and_std(printed.train_mean, printed.train_std, row.metric)
            paper_test = mean_and_std(printed.test_mean, printed.test_std, row.metric)
            cells = (
                *(paper_train, train, judge(row.train_difference, row.metric)),
                *(paper_test, test, judge(row.test_difference, row.metric)),
                *(_seeds(row), seconds(printed.seconds), seconds(row.seconds_mean)),
            )
            found.append(ReportRow(TITLES[row.dataset], row.method, _is_best(row, best), table3.name(row), cells))
    return ReportTable(title, text, BESIDE, found)


def _against_sepsa(row: table3.TableRow, best: Best, ours: Sequence[float | None], note: str = "") -> ReportRow:
    """Our row compared with the test means of SepSA, `ours` if given, then the one that the paper prints."""
    means = (*ours, table3.PAPER[row.mode, row.dataset, "SepSA"].test_mean)
    compared = [against(row.test_mean, mean, row.metric) for mean in means]
    mode = "online" if row.mode == "online" else "mini-batches"
    cells = (*_cells(row), *compared, _seeds(row), seconds(row.seconds_mean))
    return ReportRow(f"{TITLES[row.dataset]}, {mode}{note}", row.method, _is_best(row, best), "", cells)


def _cells(row: table3.TableRow) -> tuple[str, str]:
    """Our means in words, and how many runs diverged."""
    if row.diverged == row.seeds:
        return "all diverged", "all diverged"
    lost = f" ({row.diverged} of {row.seeds} diverged, left out)" if row.diverged else ""
    return (
        mean_and_std(row.train_mean, row.train_std, row.metric) + lost,
        mean_and_std(row.test_mean, row.test_std, row.metric) + lost,
    )


def _seeds(row: table3.TableRow) -> str:
    wanted = PAPER_SEEDS[row.metric]
    return str(row.seeds) if row.seeds >= wanted else f"{row.seeds} of {wanted}"


def _is_best(row: table3.TableRow, best: Best) -> bool:
    return (row.mode, row.dataset, row.method) in best


def differences(rows: Sequence[table3.TableRow], images: Sequence[table3.TableRow]) -> list[str]:
    """The means beyond two standard deviations, and last how many of the paper's rows no experiment explains."""
    lines = []
    same = [row for row in images if EXPERIMENTS[row.experiment].compared == "same method"]
    for row in (*rows, *same):
        for split, mean, printed, difference in (
            ("train", row.train_mean, row.paper_train_mean, row.train_difference),
            ("test", row.test_mean, row.paper_test_mean, row.test_difference),
        ):
            if difference is not None and abs(difference) > 2:
                note = ", with crops and flips" if EXPERIMENTS[row.experiment].crops_and_flips else ""
                where = f"{TITLES[row.dataset]}, {row.mode}{note}, {row.method}, {split}"
                values = f"{number(mean, row.metric)} where the paper has {number(printed, row.metric)}"
                lines.append(f"- {where}: {values}, {judge(difference, row.metric)[2:]}.")
    left = plural(len(table3.unexplained([*rows, *images])), "mean")
    last = (
        f"{left} of {2 * len(table3.PAPER)} are left without an explanation: no experiment here, with crops and flips "
        "or with one further setting changed, has both means of the row within two σ of what the paper prints."
    )
    return [*(lines or ["None."]), "", last] if rows else []


# ---------------------------------------------------------------------- the page and README.md


def html(
    found: Sequence[ReportTable],
    remarks: Sequence[str],
    gaps: dict[str, str],
    drawn: dict[str, CaptionedFigure],
    remarked: Sequence[str],
    out: Path,
    results: str,
) -> str:
    """The page as one text; its figures are inside, and only links to the records leave it."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("reproduction").joinpath("report.html.jinja").read_text(encoding="utf-8")
    pictures = [
        (title, drawn.get(file), f"{COMMAND} {file}", _embedded(out / "figures" / f"{file}.svg", file in drawn))
        for file, title in FIGURE_TITLES.items()
    ]
    return environment.from_string(source + "\n").render(
        tables=found, marks=MARKS, remarks=remarks, gaps=gaps, figures=pictures, notes=remarked, results=results
    )


def _embedded(file: Path, there: bool) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode('ascii')}" if there else ""


def markdown(found: Sequence[ReportTable], remarks: Sequence[str], gaps: dict[str, str], results: str) -> str:
    """The tables beside the paper's, what is unexplained and what is missing; `results` is the path to the records."""
    parts = ["<!-- written by `python -m reproduction report`: change the records or the code, not this block -->"]
    for table in (table for table in found if table.head == BESIDE):
        rules = ["--:" if name else "---" for name in table.head]
        parts += ["", f"### {table.title}", "", f"| | method | {' | '.join(table.head)} |".replace("|  |", "| |")]
        parts += [f"|---|---|{'|'.join(rules)}|"]
        for row in table.rows:
            method = f"[{row.method}]({results}/{row.record}.json)" if row.record else row.method
            parts.append(f"| {row.dataset} | {method}{' ★' if row.best else ''} | {' | '.join(row.cells)} |")
    if remarks:
        parts += ["", MARKS, "", remarks[-1]]
    if gaps:
        parts += ["", "### Not run yet", "", *(f"- {what}: `{command}`" for what, command in gaps.items())]
    return "\n".join([*parts, ""])
