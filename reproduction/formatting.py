"""Numbers in the words of the report: means with deviations, seconds, and differences from the paper."""

from __future__ import annotations

from collections.abc import Sequence

_PLUS_MINUS = "±\N{NO-BREAK SPACE}"  # a narrow cell breaks before it


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def number(value: float | None, metric: str) -> str:
    """A mean in the paper's format: accuracies with two decimals, errors with about five digits."""
    if value is None:
        return "–"
    if _is_extreme(value, metric):
        return f"{value:.3g}"
    return f"{value:,.{_decimals(value, metric)}f}"


def mean_and_std(mean: float | None, std: float | None, metric: str) -> str:
    if mean is None or std is None:
        return number(mean, metric)
    deviation = f"{std:.2g}" if _is_extreme(mean, metric) else f"{std:,.{_decimals(mean, metric)}f}"
    return f"{number(mean, metric)} {_PLUS_MINUS}{deviation}"


def _is_extreme(value: float, metric: str) -> bool:
    return metric == "mse" and not 1e-4 < abs(value) < 1e6


def _decimals(value: float, metric: str) -> int:
    return 2 if metric == "accuracy" else max(1, 5 - len(str(int(abs(value)))))


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def interval(slope: Sequence[float]) -> str:
    """An estimate with its interval: −0.50 [−0.60, −0.40]."""
    estimate, low, high = (f"{value:.2f}".replace("-", "−") for value in slope)
    return f"{estimate} [{low}, {high}]"


def against(ours: float | None, reference: float | None, metric: str) -> str:
    """An error as a multiple of the reference's, an accuracy as points above or below it."""
    if ours is None or reference is None:
        return "–"
    return f"× {ours / reference:.2f}" if metric == "mse" else f"{ours - reference:+.2f} points".replace("-", "−")


def judge(difference: float | None, metric: str) -> str:
    """A mark and the difference in the paper's standard deviations, such as "▲ 3.2 σ better"; – where there is none."""
    if difference is None:
        return "–"
    size = f"{abs(difference):.1f} σ" if abs(difference) < 100 else f"{abs(difference):.0f} σ"
    if abs(difference) <= 1:
        return f"≈ {size}"
    better = (difference < 0) == (metric == "mse")
    marks = "▽△" if abs(difference) <= 2 else "▼▲"
    return f"{marks[better]} {size} {'better' if better else 'worse'}"
