"""What ``eplb demo`` shows while it runs: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from eplb_service.atomic_write import write_atomically
from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.view import render

_SECONDS_BETWEEN_LINES = 2.0
_HEAT_STEPS = 24
_PICTURE_WIDTH = 132


class Screen:
    """Takes the score as it comes in."""

    def __init__(self, console: Console, live: Live | None, counts_TLE: npt.NDArray[np.integer]) -> None:
        self._console = console
        self._live = live
        self._counts_TLE = counts_TLE
        self._last_line = 0.0
        self._last_status = ""

    def update(self, board: Scoreboard, status: str) -> None:
        """Show the score as it is."""
        if self._live is not None:
            self._live.update(self.view(board, status))
        elif board.steps == 0 and status != self._last_status:
            self._console.print(status, highlight=False)
        elif board.steps and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            recent = max(0, board.steps - _HEAT_STEPS)
            self._console.print(
                f"step {board.steps}/{len(self._counts_TLE)}: PAR {board.par('still', recent):.3f} left alone, "
                f"{board.par('live', recent):.3f} balanced; {board.layers_switched} layers switched, "
                f"{board.bytes_moved / 1e6:.1f} MB moved",
                highlight=False,
                soft_wrap=True,
            )
        self._last_status = status

    def finish(self, summary: RenderableType) -> None:
        """Show the end result."""
        self._console.print(summary)

    def fail(self, reason: str) -> None:
        """Say what went wrong."""
        self._console.print(Text(f"eplb demo failed: {reason}", style="bold red"))

    def view(self, board: Scoreboard, status: str = "") -> RenderableType:
        """The live view as it stands."""
        recent_TLE = self._counts_TLE[max(0, board.steps - _HEAT_STEPS) : board.steps]
        heat_LE = recent_TLE.mean(axis=0) if len(recent_TLE) else None
        return render(board, len(self._counts_TLE), heat_LE, status)


@contextmanager
def screen(counts_TLE: npt.NDArray[np.integer]) -> Iterator[Screen]:
    """A screen on standard output, for heat ``counts_TLE``."""
    console = Console()
    if not console.is_terminal:
        yield Screen(console, None, counts_TLE)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield Screen(console, live, counts_TLE)


def save_picture(path: Path, view: RenderableType, summary: RenderableType) -> None:
    """Write the last view and the summary to ``path`` as an SVG picture; raises ``OutputError``."""
    console = Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(view)
    console.print()
    console.print(summary)
    write_atomically(path, console.export_svg(title="eplb demo").encode())
