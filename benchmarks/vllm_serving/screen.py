"""What a run shows: a live table on a terminal, lines elsewhere, and the summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from benchmarks.vllm_serving.score import ALONE, BALANCED, KINDS, Round


class Screen:
    """The view of a run; the runner sets what goes on, the terminal is painted from a thread of its own.

    Parameters
    ----------
    console
        Where to.
    rounds
        What is served; read whenever the view is painted.
    status
        What the service says of the balanced deployment, in one line.
    """

    def __init__(self, console: Console, rounds: Sequence[Round], status: Callable[[], str]) -> None:
        self.console = console
        self._rounds = rounds
        self._status = status
        self._doing = ""

    def doing(self, what: str) -> None:
        """Say what goes on now."""
        self._doing = what
        if not self.console.is_terminal:
            self.console.print(what, highlight=False, soft_wrap=True)

    def view(self) -> RenderableType:
        """All rounds, what goes on, and what the service says."""
        return Group(
            _rounds_table(self._rounds), Text(self._doing, style="dim"), Text(self._status(), style="cyan")
        )

    def finished(self, part: Round) -> None:
        """Report a round where nobody sees the table."""
        if not self.console.is_terminal:
            line = "; ".join(f"{kind} {_milliseconds(part, kind)}" for kind in KINDS)
            line = f"{part.phase}: {_identical(part)} identical; {line}"
            self.console.print(line, highlight=False, soft_wrap=True)
            self.console.print(self._status(), highlight=False, soft_wrap=True)


@contextmanager
def live(console: Console, rounds: Sequence[Round], status: Callable[[], str]) -> Iterator[Screen]:
    """A screen that is painted while the context lasts, where there is a terminal."""
    screen = Screen(console, rounds, status)
    if not console.is_terminal:
        yield screen
        return
    with Live(console=console, get_renderable=screen.view, refresh_per_second=2):
        yield screen


def summary(found: dict[str, Any]) -> Table:
    """The figures for people."""
    par, times, ratios = found["par"], found["latency_ms"], found["latency_ratio_by_round"]
    same = f"{found['identical']} of {found['requests']} requests, {found['tokens'][BALANCED]} tokens"
    if found["split_draws"]:
        same += f"; {found['split_draws']} more part at a draw that float32 decided"
    rows = {
        "identical text": same,
        "largest log-probability difference": f"{found['worst_difference']:.2g}",
        "failed requests": f"{found['failed'][BALANCED]} balanced, {found['failed'][ALONE]} left alone",
        "layers switched": f"{found['layers_switched']} times, while serving",
        "moved": f"{found['experts_moved']} experts, {found['bytes_moved'] / 1e6:.1f} MB",
        "PAR before the first switch": f"{par['before']:.3f}",
        "PAR since": f"{par['after']:.3f}, while domains drift",
    }
    for name, key in (("ms to the first token", "first"), ("ms per token", "token")):
        for kind, label in ((BALANCED, "with agent"), (ALONE, "without")):
            p50, p99 = times[kind][f"{key}_p50"], times[kind][f"{key}_p99"]
            rows[f"{name}, {label}"] = f"p50 {p50:.1f}, p99 {p99:.1f}"
        spread = ratios[f"{key}_p50"]
        rows[f"{name}, with / without"] = (
            f"{spread['median']:.2f} by round ({spread['min']:.2f} to {spread['max']:.2f})"
        )
    table = Table(title="Summary", show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _rounds_table(rounds: Sequence[Round]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("what people ask")
    for heading in (
        "answered",
        "failed",
        "identical",
        "first token ms",
        "with agent",
        "token ms",
        "with agent",
    ):
        table.add_column(heading, justify="right")
    for part in rounds:
        answered = " + ".join(str(len(part.answers[kind])) for kind in KINDS)
        failed = sum(part.failed(kind) for kind in KINDS)
        times = {kind: part.latency(kind) for kind in KINDS}
        table.add_row(
            part.phase,
            f"{answered} of {len(part.requests)}",
            Text(str(failed), style="red" if failed else ""),
            _identical(part),
            *(_short(times[kind].first_p50) for kind in KINDS),
            *(_short(times[kind].token_p50) for kind in KINDS),
        )
    return table


def _identical(part: Round) -> str:
    same = part.sameness
    return "" if same is None else f"{same.identical}/{same.requests}"


def _milliseconds(part: Round, kind: str) -> str:
    times = part.latency(kind)
    return f"p50 {_short(times.first_p50)} ms to the first token, {_short(times.token_p50)} ms per token"


def _short(milliseconds: float) -> str:
    return "" if math.isnan(milliseconds) else f"{milliseconds:.1f}"
