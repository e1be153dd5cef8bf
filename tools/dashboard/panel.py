"""What a panel is, and the queries and styles that panels are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CHOSEN = 'deployment=~"$deployment", instance=~"$instance"'
LEGEND = "{{deployment}} @ {{instance}}"
_KEYS = "job, instance, deployment"
GREEN_TO_RED = ((None, "green"), (0.05, "yellow"), (0.2, "orange"), (0.5, "red"))
LINE = {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 0, "showPoints": "never", "spanNulls": False}
STAIRS = {**LINE, "lineInterpolation": "stepAfter"}
BARS = {
    "drawStyle": "bars",
    "lineWidth": 1,
    "fillOpacity": 60,
    "showPoints": "never",
    "stacking": {"mode": "normal"},
}


@dataclass(frozen=True)
class Panel:
    """One panel: its title, a sentence for whoever wonders, and its queries with their legends."""

    title: str
    text: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    size: tuple[int, int] = (8, 8)
    unit: str = "short"
    decimals: int | None = None
    style: dict[str, Any] = field(default_factory=lambda: LINE)
    least: float | None = None
    thresholds: Sequence[tuple[float | None, str]] = ()
    names: dict[str, str] = field(default_factory=dict)


def of(metric: str, extra: str = "") -> str:
    """The series of one metric that are chosen at the top of the dashboard."""
    return f"{metric}{{{_CHOSEN}{', ' + extra if extra else ''}}}"


def per(metric: str, function: str = "increase") -> str:
    """A counter over each interval of the graph."""
    return f"{function}({of(metric)}[$__rate_interval])"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Median and 99th percentile of a histogram, by deployment and instance."""
    buckets = f"sum by ({_KEYS}, le) ({per(metric + '_bucket', 'rate')})"
    return [
        (f"histogram_quantile({share}, {buckets})", f"{LEGEND} {name}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def joined(left: str, operator: str, right: str, also: str = "") -> str:
    """Two metrics of the same deployment known by the same service."""
    return f"{of(left)} {operator} on ({_KEYS}{also}) {of(right)}"


Row = tuple[str, Sequence[Panel]]
"""A heading, and the panels below it."""
