"""Is every result that README.md and docs/ state in a committed JSON?

    python benchmarks/check_numbers.py [--write]

`--write` first puts the tables that scripts print by `--table` anew into the pages that show them. A result is
- in a table, every number of a cell that starts with one, but for the first column, which names the row;
- in prose, every number with a decimal point, a thousands separator, an exponent or a percent sign.
Code, comments, links and headings state none: write a setting as code, `forgetting=0.99`.

A result must stand, rounded as printed, in a JSON under benchmarks/ or results/ that the text names: in the same table
row, list item or paragraph, or else in the same section, or else in a section around it. A script stands for the JSON
of its name, and a comment names one where the text should not: <!-- results: benchmarks/loops/step_cost.json -->.
Where the JSON knows a table's row or column by name, the number must stand under that name; and the numbers of
"1.02 [1.01, 1.05]" or "8.27 ± 0.66" must stand together, as median and quartiles or mean and deviation of one thing.

Of a list of numbers its summary counts (mean, deviation, quartiles, range, length), not each entry, and rows of the
same names are summed up over their seeds. A row that the script of a JSON prints by `--table` may stand in a page word
for word. A number with a percent sign may stand in the JSON as a share, and one in ms or µs in seconds. CONSTANTS are
what is neither a result nor code; `derived` computes what a page computes from a JSON.

The last lines name the JSON files that are older than the code that they measured, and those without a record of it:
measure.machine puts a hash of each source into a JSON, which files from before it was written lack.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable

# What is no result, by page, and what it is.
CONSTANTS: dict[str, dict[str, str]] = {
    "docs/how-it-works/algorithm.md": {"1e-8": "the tolerance of a test", "20,000": "steps of the benchmark"},
    "docs/how-to/choose.md": {
        **dict.fromkeys(("0.99", "0.999"), "a forgetting"),
        **dict.fromkeys(("1e5", "1e10"), "a limit that health() tells"),
        "64": "features of a stream's body",
    },
    "reproduction/README.md": {"0.001": "a learning rate", "5": "n/(n-1) at 10 seeds"},
}
MACHINE = {
    "machine",
    "processor",
    "threads",
    "python",
    "torch",
    "numpy",
    "sources",
}  # what every JSON says of where it was made
ASKED = {"wanted"}  # columns that say what was asked for, not what came
# Whose scripts print the tables that pages show.
PRINTS = {
    f"benchmarks/{name}.json"
    for name in (
        "forecast/dayahead",
        "forecast/forecast_path",
        "forecast/m4",
        "forecast/reservoir",
        "loops/language",
        "loops/networks",
        "streams/bandit",
        "streams/continual",
        "streams/engines",
        "streams/experts",
        "streams/outliers",
        "streams/prequential",
        "streams/printed_pages",
        "streams/real_streams",
    )
}
COMMANDS = {"python -m reproduction report": "results/table3.json"}

SCALES = {"": (1.0,), "%": (1.0, 100.0), "points": (1.0, 100.0), "ms": (1.0, 1e3), "µs": (1.0, 1e6)}

NUMBER = re.compile(r"(?<![\w.,/^-])[-−+]?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(e[+-]?\d+)?(?![\w.]*\.\d)(?![A-Za-z])")
SOURCE = re.compile(r"\b((?:benchmarks|results)/[\w./-]+?)\.(?:py|json|png|svg)\b")
# Tests compare these as a whole.
GENERATED = re.compile(r"<!-- (table3|prequential) begin -->.*?<!-- \1 end -->", re.DOTALL)


class Result(NamedTuple):
    """Numbers that a page states together, where, in which unit, and where they may come from."""

    page: str
    line: int
    numbers: tuple[str, ...]
    spread: str  # what joins them: "[" or "±"; nothing for a single one
    unit: str
    sources: tuple[str, ...]
    labels: tuple[str, ...] = ()  # of its row and column


class Value(NamedTuple):
    """A number in a JSON: its key, and the names it stands under, of which the last is the object that holds it."""

    number: float
    key: str
    path: tuple[str, ...]


# ---------------------------------------------------------------------- what pages state


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "reproduction/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def results(page: str, text: str) -> Iterator[Result]:
    """The results that a page states."""
    named = text.splitlines()  # code and comments state nothing, but they name sources
    lines = stated(text).splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"#+ ", line)]
    around: dict[int, tuple[str, ...]] = {}  # the sources named under each heading above
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        depth = len(lines[start]) - len(lines[start].lstrip("#")) if lines else 0
        around = {level: found for level, found in around.items() if level < depth}
        around[depth] = sources("\n".join(named[start:end]))
        outer = next((found for _, found in sorted(around.items(), reverse=True) if found), ())
        for first, last in groups(lines, start, end):
            found = sources("\n".join(named[first:last])) or outer
            if lines[first].lstrip().startswith("|"):
                yield from in_row(page, first, lines, found)
            else:
                for n in range(first, last):
                    yield from in_prose(page, n, lines[n], found)


def stated(text: str) -> str:
    """The page without code, comments and links, each character of which becomes a space."""
    for pattern in (
        GENERATED.pattern,
        r"^```.*?^```$",
        r"(?<=\n\n)(?: {4}[^\n]*\n)+",
        r"<!--.*?-->",
        r"<[a-z/][^>]*>",
        r"`[^`\n]*`",
        r"\]\([^)\n]*\)",
    ):
        text = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)
    return text


def groups(lines: list[str], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Paragraphs, list items and table rows, as ranges of lines."""
    first = None
    for n in range(start, end):
        line = lines[n].strip()
        if first is not None and (not line or re.match(r"\||[-*#] |\d+\. |#", line)):
            yield first, n
            first = None
        if line and not line.startswith("#") and first is None:
            first = n
    if first is not None:
        yield first, end


def sources(text: str) -> tuple[str, ...]:
    """The JSON files that a text names."""
    found = [f"{name}.json" for name in SOURCE.findall(text)]
    found += [source for command, source in COMMANDS.items() if command in text]
    return tuple(dict.fromkeys(name for name in found if (ROOT / name).is_file()))


def in_prose(page: str, n: int, line: str, found: tuple[str, ...]) -> Iterator[Result]:
    for first, numbers, spread, after in together(line):
        told = any(re.search(r"[.,e]", number) for number in numbers) or spread or re.match(r"\s?%", after)
        if told and not re.search(r"(Python|torch|NumPy|scikit-learn|River|version)[\s≥]*$", line[:first]):
            unit = re.match(r"\s?(%|points|ms|µs)", after)
            yield Result(page, n + 1, numbers, spread, unit[1] if unit else "", found)


def in_row(page: str, n: int, lines: list[str], found: tuple[str, ...]) -> Iterator[Result]:
    top = n
    while top and lines[top - 1].lstrip().startswith("|"):
        top -= 1
    if n <= top + 1:  # the titles and the rule below them
        return
    titles, cells = (line.strip().strip("|").split("|") for line in (lines[top], lines[n]))
    for title, cell in list(zip(titles, cells, strict=False))[1:]:
        if plain(title) not in ASKED and re.match(r"[\s*]*[-−+×≈]?\s*\d", cell):
            for _, numbers, spread, after in together(cell):
                unit = re.search(r"%|points|\bms\b|µs", after + lines[top] + cells[0])
                labels = (plain(title), plain(cells[0]))
                yield Result(page, n + 1, numbers, spread, unit[0] if unit else "", found, labels)


def together(text: str) -> Iterator[tuple[int, tuple[str, ...], str, str]]:
    """Numbers as they belong together: where they start, they, what joins them, what follows."""
    matches = list(NUMBER.finditer(text))
    while matches:
        first, *rest = matches
        taken, spread = [first], ""
        if rest and re.fullmatch(r"\s*(±|\[)\s*", joint := text[first.end() : rest[0].start()]):
            spread = joint.strip()
            taken = matches[: 3 if spread == "[" else 2]
        yield first.start(), tuple(match[0] for match in taken), spread, text[taken[-1].end() :].lstrip("]")
        matches = matches[len(taken) :]


def plain(label: str) -> str:
    return re.sub(r"[*_`]", "", label).strip().lower()


# ---------------------------------------------------------------------- what JSON files hold


@cache
def values(source: str) -> tuple[Value, ...]:
    """The numbers of a JSON that a page may state."""
    return tuple(dict.fromkeys(_values(json.loads((ROOT / source).read_text(encoding="utf-8")), "", (source,))))


def _values(part: Any, key: str, path: tuple[str, ...]) -> Iterator[Value]:
    if isinstance(part, dict):
        path = (*path, *(value.lower() for value in part.values() if isinstance(value, str)), key)
        for name, value in part.items():
            if name not in MACHINE:
                yield from _values(value, name.lower(), path)
    elif isinstance(part, list):
        numbers = [value for value in part if isinstance(value, (int, float)) and not isinstance(value, bool)]
        yield from (Value(number, name, (*path, key)) for name, number in summary(numbers))
        yield from over_seeds([value for value in part if isinstance(value, dict)], path)
        for n, value in enumerate(part):
            if not isinstance(value, (int, float)):
                yield from _values(value, f"{key} {n}", path)
            elif len(part) <= 3:  # [slope, low, high] is no sample
                yield Value(float(value), ("median", "low", "high")[n], (*path, key))
    elif isinstance(part, (int, float)) and not isinstance(part, bool):
        yield Value(float(part), key, path)


def over_seeds(rows: list[dict[str, Any]], path: tuple[str, ...]) -> Iterator[Value]:
    """The summary of each number over rows that have the same names and differ by a seed or a split."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(sorted(value.lower() for value in row.values() if isinstance(value, str))), []).append(
            row
        )
    for names, several in alike.items():
        for key in dict.fromkeys(key for row in several for key in row) if len(several) > 1 else ():
            numbers = [row[key] for row in several if isinstance(row.get(key), (int, float))]
            yield from (Value(number, name, (*path, *names, key)) for name, number in summary(numbers))


def summary(numbers: list[float]) -> Iterator[tuple[str, float]]:
    finite = [number for number in numbers if math.isfinite(number)]
    if numbers:
        yield "length", len(numbers)
    if len(finite) == 1:
        yield "mean", finite[0]
    if len(finite) > 1:
        low, middle, high = statistics.quantiles(finite, n=4, method="inclusive")
        yield from (("mean", statistics.fmean(finite)), ("median", middle), ("q25", low), ("q75", high))
        deviation = statistics.stdev(finite)
        yield from (("std", deviation), ("std", statistics.pstdev(finite)))
        yield "std", deviation / math.sqrt(len(finite))  # of the mean
        yield from (("min", min(finite)), ("max", max(finite)))


def finals(name: str) -> dict[int, float]:
    """The final test results of a record's runs, by seed."""
    record = json.loads((ROOT / f"results/table3/{name}.json").read_text(encoding="utf-8"))
    return {run["seed"]: run["final"]["test"] for run in record["runs"]}


def derived(page: str) -> tuple[Value, ...]:
    """What a page computes from committed numbers."""
    found: list[tuple[str, float]] = []
    if page == "docs/how-it-works/performance.md":  # ratios of two contestants, turn by turn
        turns = json.loads((ROOT / "benchmarks/streams/stream.json").read_text(encoding="utf-8"))["contestants"]
        for ours, theirs in (
            ("sepsa in River", "River LinearRegression"),
            ("sepsa default learner", "sepsa network alone"),
        ):
            pairs = zip(turns[ours]["rounds"], turns[theirs]["rounds"], strict=True)
            found += summary([one / other for one, other in pairs])
    if page == "reproduction/README.md":
        newton, adam = (finals(f"mnist-online-{name}-cross-entropy") for name in ("sepsa", "adam"))
        behind = [adam[seed] - newton[seed] for seed in newton]
        found += [("mean", statistics.fmean(behind)), ("std", statistics.stdev(behind) / math.sqrt(len(behind)))]
    return tuple(Value(number, key, (page,)) for key, number in found)


# ---------------------------------------------------------------------- the one beside the other


def known(result: Result) -> tuple[Value, ...]:
    """The values that a result may be, by where it stands."""
    return _known(result.sources, result.labels)


@cache
def _known(sources: tuple[str, ...], labels: tuple[str, ...]) -> tuple[Value, ...]:
    found = tuple(value for source in sources for value in values(source))
    for label in filter(None, labels):
        found = tuple(v for v in found if any(f", {name}".endswith(f", {label}") for name in v.path)) or found
    return found


def stands(result: Result, candidates: tuple[Value, ...]) -> bool:
    """Whether values that belong together read as the result does, in its unit."""
    if len(result.numbers) == 1:
        return any(reads(result.numbers[0], result.unit, value.number) for value in candidates)
    keys = {"[": (r"median|mean|slope", r"q25|low|min", r"q75|high|max"), "±": (r"mean", r"std")}[result.spread]
    objects: dict[tuple[str, ...], list[Value]] = {}
    for value in candidates:
        objects.setdefault(value.path, []).append(value)
    return any(
        all(
            any(re.search(key, value.key) and reads(number, result.unit, value.number) for value in together)
            for key, number in zip(keys, result.numbers, strict=False)
        )
        for together in objects.values()
    )


def reads(stated: str, unit: str, number: float) -> bool:
    """Whether a number, rounded and in this unit, is what is stated."""
    value, half = rounded(stated)
    return any(abs(abs(number) * scale - value) <= half for scale in SCALES[unit])


@cache
def rounded(stated: str) -> tuple[float, float]:
    """A number as it is stated, without its sign, and half a unit of its last digit."""
    digits = re.fullmatch(r"(\d+)(?:\.(\d+))?(?:e([+-]?\d+))?", stated.replace(",", "").lstrip("-−+"))
    assert digits is not None, stated
    return float(digits[0]), 0.5 * 10.0 ** (int(digits[3] or 0) - len(digits[2] or "")) * (1 + 1e-9)


@cache
def output(source: str) -> tuple[str, ...]:
    """The lines that a script prints of its JSON."""
    script = ROOT / Path(source).with_suffix(".py")
    done = subprocess.run(
        [PYTHON, script, "--table"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    return tuple(line.strip() for line in done.stdout.splitlines())


def tables(lines: list[str]) -> Iterator[tuple[tuple[str, str], int, int]]:
    """The tables in a text: the title above and the first line, and where the rows below the rule begin and end."""
    title, start = "", None
    for n, line in enumerate([*lines, ""]):
        if re.match(r"#|\*\*.*\*\*$", line):
            title = line.strip("#* ")
        if line.startswith("|") and start is None:
            start = n
        if not line.startswith("|") and start is not None:
            yield (title, lines[start].strip()), start + 2, n
            start = None


def rewritten(text: str) -> str:
    """A page with its tables as scripts print them now: whole below a printed title, else the rows that it has.

    A row that a script prints with several numbers, as for two schedules, stays as it is.
    """
    lines = text.split("\n")
    shown = [list(output(source)) for source in sorted(PRINTS & {*sources(text)})]
    printed = [(key, told[a:b]) for told in shown for key, a, b in tables(told)]
    new, named = dict(printed), dict[tuple[str, str], set[str]]()
    for (_, first), rows in printed:
        for row in rows:
            named.setdefault((first, row.split("|")[1]), set()).add(row)
    for (title, first), start, end in reversed(list(tables(lines))):
        found = [(row, named.get((first, row.split("|")[1]), {row})) for row in lines[start:end]]
        lines[start:end] = new.get((title, first)) or [min(now) if len(now) == 1 else row for row, now in found]
    return "\n".join(lines)


def unfounded(page: str, text: str) -> Iterator[str]:
    """What a page states and no JSON holds, in words."""
    computed, lines = derived(page), text.splitlines()
    for result in results(page, text):
        if any(number in CONSTANTS.get(page, {}) for number in result.numbers):
            continue
        where = f"{result.page}:{result.line}: {', '.join(result.numbers)}"
        if not result.sources:
            yield f"{where} names no JSON: name its benchmark beside it, or write it as `code` if it is a setting"
        elif stands(result, known(result)) or stands(result, computed):
            continue
        elif not any(lines[result.line - 1].strip() in output(source) for source in PRINTS & {*result.sources}):
            yield f"{where} is not in {', '.join(result.sources)}"


def source_hash(path: Path) -> str:
    """A hash of a Python file, or of those in a folder, and nothing below it."""
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def changed(source: str) -> list[str] | None:
    """The sources of a JSON that have changed since it was written; None where it does not name them."""
    content = json.loads((ROOT / source).read_text(encoding="utf-8"))
    content = content if isinstance(content, dict) else {}
    machine = content.get("machine")  # in some files it holds all of `measure.machine`
    then = (machine if isinstance(machine, dict) else content).get("sources")
    return then and [name for name, known in then.items() if source_hash(ROOT / name) != known]


def print_ages() -> None:
    """Say which JSON files of benchmarks/ are older than the code that they measured."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.json"))
    ages = {name: changed(name) for name in files}
    for name, sources in ages.items():
        if sources:
            print(f"{name} is older than {', '.join(sources)}")
    unknown = [name for name, sources in ages.items() if sources is None]
    print("no record of their code:", ", ".join(unknown) or "none")
    old = sum(map(bool, ages.values()))
    print(f"{len(ages)} JSON files of benchmarks/: {old} older than their code, {len(unknown)} without a record")


def main() -> int:
    told, checked = [], 0
    for path in pages():
        if "--write" in sys.argv:
            path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        checked += sum(len(result.numbers) for result in results(page, text))
        told += unfounded(page, text)
    print("\n".join([*told, f"{checked} results in {len(pages())} pages, {len(told)} without a JSON"]))
    print_ages()
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
