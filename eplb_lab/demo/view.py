"""Display of a running demo as a live view or as log lines. The last view can be saved as a picture."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eplb_core.atomic_write import write_atomically
from eplb_core.figures import size_text
from eplb_core.placement import Float64, mean_par, par
from eplb_lab.demo.scoreboard import Scoreboard
from eplb_lab.demo.stage import device_text

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 24
_HOT = 1.25
_WARM = 1.1
_SECONDS_BETWEEN_LINES = 2.0
_PICTURE_WIDTH = 132
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Screen:
    """Display of the scoreboard: a live view in a terminal, or a line every few seconds otherwise.

    Parameters
    ----------
    console
        Console to print to.
    live
        Live display in the terminal; ``None`` if the output is not a terminal.
    steps
        Number of steps in the demo.
    """

    def __init__(self, console: Console, live: Live | None, steps: int) -> None:
        self._console = console
        self._live = live
        self._steps = steps
        self._last_line = 0.0
        self._last_status = ""

    def update(self, board: Scoreboard, status: str) -> None:
        """Show the current scoreboard and status."""
        if self._live is not None:
            self._live.update(self.view(board, status))
        elif board.steps == 0 and status != self._last_status:
            self._console.print(status, highlight=False, markup=False)
        elif board.steps and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            recent = max(0, board.steps - _RECENT_STEPS)
            self._console.print(
                f"step {board.steps}/{self._steps}: PAR {board.par('still', recent):.3f} unbalanced, "
                f"{board.par('live', recent):.3f} balanced; {board.layers_switched} layers switched, "
                f"{size_text(board.total('bytes_received'))} moved",
                highlight=False,
                soft_wrap=True,
            )
        self._last_status = status

    def finish(self, summary: RenderableType) -> None:
        """Print the summary."""
        self._console.print(summary)

    def fail(self, reason: str) -> None:
        """Print the reason why the demo failed."""
        self._console.print(Text(f"eplb demo failed: {reason}", style="bold red"))

    def view(self, board: Scoreboard, status: str = "") -> RenderableType:
        """Return the current view: the rank loads of each layer, unbalanced and balanced side by side."""
        if board.steps == 0:
            return Text(status, style="dim")
        device = Text(f"step times are {device_text()}", style="dim")
        return Group(
            _figures_table(board, self._steps), _layers_table(board), device, Text(status, style="dim")
        )


@contextmanager
def screen(steps: int) -> Iterator[Screen]:
    """Open a screen on standard output for a demo of ``steps`` steps."""
    console = Console()
    if not console.is_terminal:
        yield Screen(console, None, steps)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield Screen(console, live, steps)


def save_picture(path: Path, view: RenderableType, summary: RenderableType) -> None:
    """Write the last view and the summary as an SVG picture. Raises ``OutputError`` if the file cannot be written."""
    console = Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(view)
    console.print()
    console.print(summary)
    # Rich references web fonts. Remove these references, so that viewing the picture needs no network access.
    write_atomically(path, _WEB_FONT.sub("", console.export_svg(title="eplb demo")).encode())


def _figures_table(board: Scoreboard, total_steps: int) -> Table:
    """Return the current figures as a row of names and a row of values."""
    live_ms = board.milliseconds("live")[-_RECENT_STEPS:]
    still_ms = board.milliseconds("still")[-_RECENT_STEPS:]
    agent_ms = board.milliseconds("agent")[-_RECENT_STEPS:]
    recent = max(0, board.steps - _RECENT_STEPS)
    table = Table.grid(padding=(0, 3))
    cells = {
        "step": f"{board.steps}/{total_steps}",
        "PAR unbalanced": f"{board.par('still', recent):.3f}",
        "PAR balanced": f"{board.par('live', recent):.3f}",
        "layers switched": str(board.layers_switched),
        "moved": f"{board.total('experts_received')} experts, {size_text(board.total('bytes_received'))}",
        "step unbalanced / balanced": f"{still_ms.mean():.1f} / {live_ms.mean():.1f} ms",
        "agent": f"{np.median(agent_ms):.2f} ms",
    }
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(value, style="bold") for value in cells.values()))
    return table


def _layers_table(board: Scoreboard) -> Table:
    """Return one row per layer with the recent rank loads and PAR, unbalanced and balanced."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("layer", "ranks unbalanced", "PAR", "ranks balanced", "PAR"):
        table.add_column(heading, justify="right" if heading in ("layer", "PAR") else "left")
    loads = {kind: board.loads(kind, _RECENT_STEPS) for kind in ("still", "live")}
    for layer in range(board.layers):
        cells: list[RenderableType] = [str(layer)]
        for kind in ("still", "live"):
            loads_TR = loads[kind][:, layer]
            cells += [_bars(loads_TR.mean(axis=0)), f"{mean_par(par(loads_TR[:, None])):.2f}"]
        table.add_row(*cells)
    return table


def _bars(values: Float64) -> Text:
    """Return one block character per value, scaled to the highest value. Hot ranks are red, warm ones yellow."""
    highest = max(float(values.max()), 1e-9)
    mean = max(float(values.mean()), 1e-9)
    text = Text()
    for value in values:
        block = _BLOCKS[round(float(value) / highest * (len(_BLOCKS) - 1))]
        ratio = float(value) / mean
        text.append(block, style=_colour(ratio))
    return text


def _colour(ratio: float) -> str:
    """Return the colour of a rank whose load is ``ratio`` times the mean."""
    if ratio > _HOT:
        return "red"
    return "yellow" if ratio > _WARM else "green"
