"""`sepsa report`: the paper's table and figures beside ours, drawn from the records under results/.

Each call makes everything again from the records, and equal records give equal bytes.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import jinja2

from sepsa.paper import figures, table3
from sepsa.paper.captions import CaptionedFigure, draw
from sepsa.paper.data import NAMES, TITLES, metric
from sepsa.paper.experiments import CLASSIFICATION_SEEDS, EXPERIMENTS, FIGURES, MODES, REGRESSION_SEEDS, TABLES, plan
from sepsa.paper.formatting import against, judge, mean_and_std, number, plural, seconds
from sepsa.paper.methods import slug
from sepsa.paper.records import missing as not_recorded
from sepsa.paper.records import write as write_file

HEADINGS = {name: experiment.heading for name, experiment in EXPERIMENTS.items()} | {"convergence": "Convergence"}
FIGURE_TITLES = {name: EXPERIMENTS[name].title for name in FIGURES}
FIGURE_TITLES["convergence"] = "Theorem 1, and the cost of a step"
IMAGES = tuple(name for name in TABLES if name != "table3")
COMPARED = tuple(name for name in IMAGES if EXPERIMENTS[name].compared)
PAPER_SEEDS = {"mse": len(REGRESSION_SEEDS), "accuracy": len(CLASSIFICATION_SEEDS)}
MODE_TITLES = {"online": "Online: one sample at a time, one pass", "mini-batch": "Mini-batches"}
METRIC_TITLES = {"mse": "mean squared error, less is better", "accuracy": "accuracy in %, more is better"}
BEGIN, END = "<!-- table3 begin -->", "<!-- table3 end -->"

Best = set[tuple[str, str, str]]  # mode, data set, method
Group = dict[str, Any]
Line = tuple[str, str, dict[str, Any]]  # mode, data set, cells


def write(results: Path, out: Path, docs: Path | None = None) -> None:
    """Write the table, the figures and the page from the records under `results`.

    They go to `results/table3.json` and `images.json`, `out/figures/` and `out/report.html`; `docs` is a markdown file
    whose block between the marks "table3 begin" and "table3 end" is replaced. Runs that are missing are listed with the
    commands that make them.
    """
    if not results.is_dir():
        raise FileNotFoundError(f"results must be a folder of records, got {str(results)!r}: run `sepsa reproduce all`")
    page = docs.read_text(encoding="utf-8") if docs is not None else ""
    if docs is not None and not 0 <= page.find(BEGIN) < page.find(END):
        raise ValueError(f"docs must hold the lines {BEGIN} and {END}, got {str(docs)!r} without them: write them in")
    records = table3.read(results)
    rows, images = table3.table3(records), table3.table3(records, IMAGES)
    gaps = missing(results, records)
    for file, table in (("table3", rows), ("images", images)):
        text = json.dumps([asdict(row) for row in table], indent=1, allow_nan=False)
        write_file(results / f"{file}.json", text + "\n")
    drawn = draw(records, results / "convergence.json")
    for file, figure in drawn.items():
        figures.save(figure.figure, out / "figures" / f"{file}.svg")
        figure.figure.set_layout_engine("none")  # keep the layout: computing it again takes longer than drawing
        figures.save(figure.figure, out / "figures" / f"{file}.png")
    write_file(out / "report.html", html(records, rows, images, gaps, drawn, out / "figures"))
    if docs is not None:
        relative = Path(os.path.relpath(results, docs.parent)).as_posix()
        before, after = page[: page.find(BEGIN) + len(BEGIN)], page[page.find(END) :]
        write_file(docs, f"{before}\n{markdown(rows, images, gaps, relative)}\n{after}")


@dataclass(frozen=True)
class MissingRuns:
    """Runs that no record holds, in words, and the command that makes them."""

    what: str
    command: str


def missing(results: Path, records: Iterable[table3.Record]) -> list[MissingRuns]:
    """The runs of the paper's experiments that are not recorded; in a folder of quick runs, those of the quick ones."""
    quick = {bool(run.spec.get("quick")) for record in records for run in record.runs} == {True}
    option = " --quick" if quick else ""
    gaps = []
    for experiment in EXPERIMENTS:
        wanted = plan(experiment, quick=quick)
        lacking = not_recorded(results, wanted)
        if len(lacking) == len(wanted):
            gaps.append(MissingRuns(HEADINGS[experiment], f"sepsa reproduce {experiment}{option}"))
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
            gaps.append(MissingRuns(what, f"sepsa reproduce {experiment}{options}{option}"))
    if not (results / "convergence.json").exists():
        gaps.append(MissingRuns(HEADINGS["convergence"], f"sepsa reproduce convergence{option}"))
    return gaps


# ---------------------------------------------------------------------- rows and groups of the tables


def _cells(row: table3.TableRow, best: Best) -> dict[str, Any]:
    """The cells of our own numbers, in words."""
    paper_seeds = PAPER_SEEDS[row.metric]
    cells = {
        "method": row.method,
        "anchor": _anchor(row),
        "best": (row.mode, row.dataset, row.method) in best,
        "train": mean_and_std(row.train_mean, row.train_std, row.metric),
        "test": mean_and_std(row.test_mean, row.test_std, row.metric),
        "diverged": f"{row.diverged} of {row.seeds} diverged, left out" if 0 < row.diverged < row.seeds else "",
        "train_verdict": judge(row.train_difference, row.metric),
        "test_verdict": judge(row.test_difference, row.metric),
        "seeds": str(row.seeds) if row.seeds >= paper_seeds else f"{row.seeds} of {paper_seeds}",
        "seconds": seconds(row.seconds_mean),
    }
    return cells | (dict.fromkeys(("train", "test"), "all diverged") if row.diverged == row.seeds else {})


def _anchor(row: table3.Record | table3.TableRow) -> str:
    return f"runs-{table3.name(row).replace('/', '-')}"


def _printed_cells(printed: table3.Printed, metric: str) -> dict[str, str]:
    return {
        "paper_train": mean_and_std(printed.train_mean, printed.train_std, metric),
        "paper_test": mean_and_std(printed.test_mean, printed.test_std, metric),
        "paper_seconds": seconds(printed.seconds),
    }


def _groups(lines: Sequence[Line], cases: Iterable[tuple[str, str]], title: str = "{dataset}") -> list[Group]:
    """The lines of each case (mode, data set) that has any, under a title of the given format."""
    found = {case: [cells for *key, cells in lines if tuple(key) == case] for case in cases}
    return [
        {
            "title": title.format(dataset=TITLES[dataset], mode="online" if mode == "online" else "mini-batches"),
            "metric": METRIC_TITLES[metric(dataset)],
            "rows": rows,
        }
        for (mode, dataset), rows in found.items()
        if rows
    ]


def _paper_groups(rows: Iterable[table3.TableRow], mode: str, best: Best) -> list[Group]:
    """All rows of the paper in one mode, by data set, each beside ours if it has been run."""
    ours = {(row.mode, row.dataset, row.method): _cells(row, best) for row in rows}
    lines = [
        (*key[:2], ours.get(key, {"method": key[2], "anchor": "", "best": False}) | _printed_cells(row, metric(key[1])))
        for key, row in table3.PAPER.items()
    ]
    return _groups(lines, product([mode], NAMES))


def _variant_groups(rows: Sequence[table3.TableRow], mode: str) -> list[Group]:
    """Our rows of one mode, by data set, each beside the paper's row that it is a variant of."""
    lines = [
        (row.mode, row.dataset, _cells(row, set()) | _printed_cells(printed, row.metric))
        for row in rows
        if (printed := table3.compared_row(row))
    ]
    return _groups(lines, product([mode], NAMES))


def _image_groups(images: Sequence[table3.TableRow]) -> list[Group]:
    """The rows of the experiments that the paper has no row for, compared with the paper's SepSA."""
    groups = []
    cases = [(mode, dataset) for dataset, mode in product(NAMES, MODES)]
    for experiment in IMAGES:
        if experiment not in COMPARED:
            lines = _lines_against_sepsa([row for row in images if row.experiment == experiment], {})
            note = ", crops and flips" if EXPERIMENTS[experiment].crops_and_flips else ""
            groups += _groups(lines, cases, "{dataset}, {mode}" + note)
    return groups


def _extra_groups(rows: Sequence[table3.TableRow], best: Best) -> list[Group]:
    """The rows of Table III that the paper lacks, compared with SepSA: ours and the paper's."""
    sepsa = {(row.mode, row.dataset): row.test_mean for row in rows if row.method == "SepSA"}
    lines = _lines_against_sepsa([row for row in rows if row.paper_test_mean is None], sepsa, best)
    return _groups(lines, product(MODES, NAMES), "{dataset}, {mode}")


def _lines_against_sepsa(
    rows: Sequence[table3.TableRow], ours: Mapping[tuple[str, str], float | None], best: Best | None = None
) -> list[Line]:
    """Our rows compared with the paper's SepSA and with `ours`, its test means by mode and data set."""
    best = table3.best_methods(rows) if best is None else best
    lines = []
    for row in rows:
        case, printed = (row.mode, row.dataset), table3.PAPER[row.mode, row.dataset, "SepSA"].test_mean
        means = {"against_ours": ours.get(case), "against_paper": printed}
        compared = {key: against(row.test_mean, mean, row.metric) for key, mean in means.items()}
        lines.append((*case, _cells(row, best) | compared))
    return lines


# ---------------------------------------------------------------------- the page


def html(
    records: Sequence[table3.Record],
    rows: Sequence[table3.TableRow],
    images: Sequence[table3.TableRow],
    gaps: Sequence[MissingRuns],
    drawn: Mapping[str, CaptionedFigure],
    folder: Path,
) -> str:
    """The page as one text that needs no other file; `folder` holds the figures as SVG."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    source = resources.files("sepsa.paper").joinpath("report.html.jinja").read_text(encoding="utf-8")
    best = table3.best_methods(rows)
    kinds = [
        verdict.kind
        for row in rows
        for difference in (row.train_difference, row.test_difference)
        if (verdict := judge(difference, row.metric))
    ]
    runs = [run for record in records for run in record.runs]
    return environment.from_string(source).render(
        printed=2 * len(table3.PAPER),
        compared=len(kinds),
        tally={
            "near": kinds.count("near"),
            "mid": sum(kind.startswith("mid") for kind in kinds),
            "better": kinds.count("far better"),
            "worse": kinds.count("far worse"),
        },
        quick=sum(bool(run.spec.get("quick")) for run in runs),
        total=len(runs),
        notes=list(dict.fromkeys(run.note for run in runs if run.note)),
        gaps=gaps,
        sections=[{"title": MODE_TITLES[mode], "groups": _paper_groups(rows, mode, best)} for mode in MODES],
        comparisons=_comparisons(images),
        unexplained=len(table3.unexplained([*rows, *images])),
        extras=_extra_groups(rows, best),
        images=_image_groups(images),
        figures=[_figure(file, drawn.get(file), folder) for file in FIGURE_TITLES],
        records=[_runs_of(record) for record in records if record.experiment in TABLES],
    )


def _comparisons(images: Sequence[table3.TableRow]) -> list[dict[str, Any]]:
    """The sections of experiments that repeat rows of the paper's table with other settings."""
    found = []
    for experiment in COMPARED:
        record, rows = EXPERIMENTS[experiment], [row for row in images if row.experiment == experiment]
        sections = []
        for mode in MODES:
            groups = _variant_groups(rows, mode) if record.compared == "variant" else _paper_groups(rows, mode, set())
            groups = [group for group in groups if any(row["anchor"] for row in group["rows"])]
            sections += [{"title": MODE_TITLES[mode], "groups": groups}] if groups else []
        if sections:
            found.append({"name": experiment, "title": record.title, "text": record.text, "sections": sections})
    return found


def _figure(file: str, drawn: CaptionedFigure | None, folder: Path) -> dict[str, Any]:
    view = {"name": file, "short": HEADINGS[file], "title": FIGURE_TITLES[file], "uri": ""}
    view["command"] = f"sepsa reproduce {file}"
    if drawn is None:
        return view
    width, height = (round(float(inches) * 96) for inches in drawn.figure.get_size_inches())
    code = base64.b64encode((folder / f"{file}.svg").read_bytes()).decode("ascii")
    picture = {"uri": f"data:image/svg+xml;base64,{code}", "width": width, "height": height}
    return view | picture | {"caption": drawn.caption, "alt": drawn.alt}


def _runs_of(record: table3.Record) -> dict[str, Any]:
    """The runs of one row, with the settings that all of them share."""
    in_title = ("experiment", "dataset", "mode", "method", "seed", "note")
    settings = [
        {key: value for key, value in run.spec.items() if key not in in_title}
        | {f"{package} version": version for package, version in run.versions.items()}
        for run in record.runs
    ]
    spec = [
        (key, f"{value:g}" if isinstance(value, float) else value)
        for key, value in settings[0].items()
        if value not in (None, False) and all(other.get(key) == value for other in settings)
    ]
    return {
        "anchor": _anchor(record),
        "title": f"{HEADINGS[record.experiment]}: {TITLES[record.dataset]}, {record.mode}, {record.method}",
        "count": plural(len(record.runs), "run"),
        "spec": spec,
        "runs": [
            {
                "seed": run.seed,
                "train": "diverged" if run.diverged else number(run.train, record.metric),
                "test": "diverged" if run.diverged else number(run.test, record.metric),
                "seconds": seconds(run.seconds),
                "device": run.device,
            }
            for run in record.runs
        ],
    }


# ---------------------------------------------------------------------- docs/reproduction.md


def markdown(
    rows: Sequence[table3.TableRow], images: Sequence[table3.TableRow], gaps: Sequence[MissingRuns], results: str
) -> str:
    """Table III side by side, the rows the paper lacks, and what differs; `results` is the path to the records."""
    best = table3.best_methods(rows)
    parts = ["<!-- written by `sepsa report`: change the records or the code, not this block -->"]
    for mode in MODES:
        parts += _side_by_side(MODE_TITLES[mode], [row for row in rows if row.mode == mode], results, best)
    for experiment, mode in product(COMPARED, MODES):
        compared = [row for row in images if (row.experiment, row.mode) == (experiment, mode)]
        parts += _side_by_side(f"{EXPERIMENTS[experiment].title}, {mode}", compared, results, best)
    parts += _against_sepsa(
        "Images with tuned settings", _image_groups(images), {"against_paper": "test against SepSA, printed"}
    )
    parts += _against_sepsa(
        "Methods that the paper does not compare",
        _extra_groups(rows, best),
        {"against_ours": "test against SepSA, ours", "against_paper": "against SepSA, printed"},
    )
    if rows:
        same = [row for row in images if EXPERIMENTS[row.experiment].compared == "same method"]
        parts += [
            "",
            "Mean squared error on Energy and Diabetes, accuracy in percent on MNIST and CIFAR-10; ± is the standard "
            "deviation over seeds (ours of the sample, n − 1), σ the one that the paper prints. ≈ within one σ, △ ▽ "
            "within two, ▲ ▼ beyond, pointing up where ours is better. ★ best test result of all our rows for that "
            "data set and mode.",
            "",
            "### Rows beyond two standard deviations",
            "",
            *(_beyond([*rows, *same]) or ["None."]),
            "",
            f"{plural(len(table3.unexplained([*rows, *images])), 'mean')} of {2 * len(table3.PAPER)} are left without "
            "an explanation: no experiment here, with crops and flips or with one further setting changed, has both "
            "means of the row within two σ of what the paper prints.",
        ]
    if gaps:
        parts += ["", "### Not run yet", "", *(f"- {gap.what}: `{gap.command}`" for gap in gaps)]
    return "\n".join([*parts, ""])


def _side_by_side(title: str, rows: Iterable[table3.TableRow], results: str, best: Best) -> list[str]:
    lines = [
        _line(row, printed, f"{results}/{table3.name(row)}.json", best)
        for row in rows
        if (printed := table3.compared_row(row))
    ]
    head = "| | method | train, paper | ours | | test, paper | ours | | seeds | seconds, paper | ours |"
    rule = "|---|---|--:|--:|---|--:|--:|---|--:|--:|--:|"
    return ["", f"### {title}", "", head, rule, *lines] if lines else []


def _line(row: table3.TableRow, printed: table3.Printed, record: str, best: Best) -> str:
    cells = _cells(row, best) | _printed_cells(printed, row.metric)
    numbers = []
    for split in ("train", "test"):
        verdict = cells[f"{split}_verdict"]
        words = f"{verdict.mark} {verdict.text}" if verdict else "–"
        numbers += [cells[f"paper_{split}"], _with_diverged(cells, split), words]
    method = f"[{row.method}]({record}){' ★' if cells['best'] else ''}"
    times = [cells["seeds"], cells["paper_seconds"], cells["seconds"]]
    return f"| {TITLES[row.dataset]} | {' | '.join([method, *numbers, *times])} |"


def _against_sepsa(title: str, groups: Sequence[Group], columns: Mapping[str, str]) -> list[str]:
    """A table of groups; `columns` gives the comparisons that it shows, with their headings."""
    head = ["method", "train", "test", *columns.values(), "seeds", "seconds"]
    lines = []
    for group in groups:
        for row in group["rows"]:
            splits = [_with_diverged(row, split) for split in ("train", "test")]
            cells = [*splits, *(row[column] for column in columns), row["seeds"], row["seconds"]]
            lines.append(f"| {group['title']} | {row['method']}{' ★' if row['best'] else ''} | {' | '.join(cells)} |")
    rule = f"|---|---|{'--:|' * (len(head) - 1)}"
    return ["", f"### {title}", "", f"| | {' | '.join(head)} |", rule, *lines] if lines else []


def _with_diverged(cells: Mapping[str, Any], split: str) -> str:
    return f"{cells[split]} ({cells['diverged']})" if cells["diverged"] else str(cells[split])


def _beyond(rows: Iterable[table3.TableRow]) -> list[str]:
    lines = []
    for row in rows:
        for split, mean, printed, difference in (
            ("train", row.train_mean, row.paper_train_mean, row.train_difference),
            ("test", row.test_mean, row.paper_test_mean, row.test_difference),
        ):
            verdict = judge(difference, row.metric)
            if verdict and verdict.kind.startswith("far"):
                note = ", with crops and flips" if EXPERIMENTS[row.experiment].crops_and_flips else ""
                where = f"{TITLES[row.dataset]}, {row.mode}{note}, {row.method}, {split}"
                values = f"{number(mean, row.metric)} where the paper has {number(printed, row.metric)}"
                lines.append(f"- {where}: {values}, {verdict.text}.")
    return lines
