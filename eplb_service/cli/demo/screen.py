"""What ``eplb demo`` shows while it runs: a live view on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from eplb_service.atomic_write import write_atomically
from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.view import render

_SECONDS_BETWEEN_LINES = 2.0
_HEAT_STEPS = 24
_PICTURE_WIDTH = 132
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Screen:
    """Takes the score as it comes in."""

    def __init__(self, console: Console, live: Live | None, steps: int) -> None:
        self._console = console
        self._live = live
        self._steps = steps
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
                f"step {board.steps}/{self._steps}: PAR {board.par('still', recent):.3f} left alone, "
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
        """The live view as it is now."""
        heat_LE = board.counts(_HEAT_STEPS).mean(axis=0) if board.steps else None
        return render(board, self._steps, heat_LE, status)


@contextmanager
def screen(steps: int) -> Iterator[Screen]:
    """A screen on standard output, for a demo of so many steps."""
    console = Console()
    if not console.is_terminal:
        yield Screen(console, None, steps)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield Screen(console, live, steps)


def save_picture(path: Path, view: RenderableType, summary: RenderableType) -> None:
    """Write the last view and the summary to ``path`` as an SVG picture; raises ``OutputError``."""
    console = Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(view)
    console.print()
    console.print(summary)
    # The fonts that rich names are fetched from elsewhere; a picture is to be whole by itself.
    write_atomically(path, _WEB_FONT.sub("", console.export_svg(title="eplb demo")).encode())
