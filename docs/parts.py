"""Print the page of parts: what a stream learner and a forecaster store, from the tables that declare it.

    python docs/parts.py

The site's build adds it as parts.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

HEAD = """# What a learner stores

A stream learner and a forecaster are tables of parts. Each part is declared once: kernels see it, files hold it and
`load` checks it by this declaration. Arrays have the shape of the sizes named; a number of a record has a row of its
own. `unit` says what a part scales with, and by which power.
"""
COLUMNS = ("part", "type", "shape", "start", "bounds", "unit")


def rows(group: Any) -> Iterator[tuple[str, ...]]:
    """Yield a row for each array and each number of a record that a group of parts keeps."""
    for part in group.parts:
        fields = getattr(part.dtype, "fields", None)
        for name, each in (fields or {"": part}).items() if part.kept else ():
            kind = each.dtype if each.dtype == "body" else np.dtype(each.dtype).name
            low, high = ("" if bound is None else str(bound) for bound in each.bounds)
            yield (
                f"`{part.name}`" + (f" {name}" if name else ""),
                kind,
                " × ".join(map(str, part.shape)),
                "by sizes" if callable(each.start) else f"{each.start:g}",
                f"{low} … {high}" if low + high else "",
                f"{each.unit[0]} ^ {each.unit[1]}" if each.unit[0] else "",
            )


def table(group: Any) -> str:
    """Return the parts of a group as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(group)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    """Return the page of all groups that keep a part."""
    from sepsa.forecast.kernels import parts
    from sepsa.learner.experts import EXPERTS, network_parts, step
    from sepsa.learner.memory.views import Group

    learner = dict.fromkeys(expert.group for expert in EXPERTS)
    learner |= dict.fromkeys([network_parts.heads, step.parts])
    forecaster = dict.fromkeys(
        each for each in vars(parts).values() if isinstance(each, Group)
    )
    chapters = {"Stream learner": learner, "Forecaster": forecaster}
    out = [HEAD]
    for title, groups in chapters.items():
        out.append(f"## {title}\n")
        kept = (group for group in groups if any(part.kept for part in group.parts))
        out += [f"### {group.name}\n\n{table(group)}\n" for group in kept]
    return "\n".join(out)


if __name__ == "__main__":
    print(page())
