"""The demo's live view: each layer's ranks, left alone and balanced, side by side."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.placement import Float64, mean_par, par

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 24
_HOT, _WARM = 1.25, 1.1
_MOST_EXPERT_BARS = 48


def render(board: Scoreboard, total_steps: int, heat_LE: Float64 | None, status: str) -> RenderableType:
    """The view as it is now; ``heat_LE`` is the recent heat by expert, ``status`` one line of what goes on."""
    if board.steps == 0:
        return Text(status, style="dim")
    return Group(_figures(board, total_steps), _layers(board, heat_LE), Text(status, style="dim"))


def _figures(board: Scoreboard, total_steps: int) -> Table:
    live_ms = board.milliseconds("live")[-_RECENT_STEPS:]
    still_ms = board.milliseconds("still")[-_RECENT_STEPS:]
    recent = max(0, board.steps - _RECENT_STEPS)
    table = Table.grid(padding=(0, 3))
    cells = {
        "step": f"{board.steps}/{total_steps}",
        "PAR at start": f"{board.par('live', 0, _RECENT_STEPS):.3f}",
        "PAR left alone": f"{board.par('still', recent):.3f}",
        "PAR balanced": f"{board.par('live', recent):.3f}",
        "layers switched": str(board.layers_switched),
        "moved": f"{board.experts_moved} experts, {board.bytes_moved / 1e6:.1f} MB",
        "step ms with/without": f"{np.median(live_ms):.1f} / {np.median(still_ms):.1f}",
    }
    table.add_row(*(Text(name, style="dim") for name in cells))
    table.add_row(*(Text(value, style="bold") for value in cells.values()))
    return table


def _layers(board: Scoreboard, heat_LE: Float64 | None) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("layer", "ranks left alone", "PAR", "ranks balanced", "PAR", "heat of experts"):
        table.add_column(heading, justify="right" if heading in ("layer", "PAR") else "left")
    loads = {kind: board.loads(kind, _RECENT_STEPS) for kind in ("still", "live")}
    for layer in range(board.layers):
        cells: list[RenderableType] = [str(layer)]
        for kind in ("still", "live"):
            loads_TR = loads[kind][:, layer]
            cells += [_bars(loads_TR.mean(axis=0)), f"{mean_par(par(loads_TR[:, None])):.2f}"]
        cells.append(
            Text("") if heat_LE is None else _bars(heat_LE[layer][:_MOST_EXPERT_BARS], coloured=False)
        )
        table.add_row(*cells)
    return table


def _bars(values: Float64, coloured: bool = True) -> Text:
    """One block per value, as high as its share of the highest; hot ranks in red."""
    highest, mean = max(float(values.max()), 1e-9), max(float(values.mean()), 1e-9)
    text = Text()
    for value in values:
        block = _BLOCKS[round(float(value) / highest * (len(_BLOCKS) - 1))]
        ratio = float(value) / mean
        colour = "red" if ratio > _HOT else "yellow" if ratio > _WARM else "green"
        text.append(block, style=colour if coloured else "cyan")
    return text
