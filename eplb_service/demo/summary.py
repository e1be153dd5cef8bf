"""What a demo came to: the figures that ``--json`` writes, the table that people read, and the verdict."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from eplb_service.demo.scoreboard import Float64, Scoreboard
from eplb_service.planner.noise_floor import noise_floor


def summarise(board: Scoreboard, counts_TLE: npt.NDArray[np.integer]) -> dict[str, Any]:
    """Figures of a finished run over the heat ``counts_TLE``.

    Both PARs are realised, per step, over the same steps: those after the first layer has switched.
    """
    first = board.first_switched_step
    scored_from = 0 if first is None else first
    floor_L = noise_floor(counts_TLE[scored_from : board.steps].astype(np.float64), board.ranks)
    return {
        "par_static": board.par("still", scored_from),
        "par_balanced": board.par("live", scored_from),
        "par_noise_floor": float(floor_L.mean()),
        "par_static_all_steps": board.par("still"),
        "par_balanced_all_steps": board.par("live"),
        "scored_from_step": scored_from,
        "layers_switched": board.layers_switched,
        "experts_moved": board.experts_moved,
        "bytes_moved": board.bytes_moved,
        "max_abs_output_diff": board.worst_difference,
        "float32_rounding_bound": board.rounding_bound,
        "step_ms": {
            "with_agent": _quantiles(board.milliseconds("live")),
            "without_agent": _quantiles(board.milliseconds("still")),
        },
        "steps": board.steps,
        "ranks": board.ranks,
        "layers": board.layers,
    }


def complaint(board: Scoreboard) -> str | None:
    """Why the run does not show what it should, or ``None``."""
    if board.worst_difference > board.rounding_bound:
        return (
            f"outputs differ by {board.worst_difference:.3g} from the layers left alone, "
            f"more than the {board.rounding_bound:.3g} that float32 rounding explains"
        )
    if board.halted is not None:
        return f"a rank stopped balancing: {board.halted}"
    if board.layers_switched == 0:
        return "no layer was switched; try more steps or heat that is less even"
    return None


def table(summary: dict[str, Any]) -> Table:
    """The summary for people."""
    shown = Table(title="Summary", show_header=False, title_justify="left", title_style="bold")
    static, balanced, floor = (summary[f"par_{kind}"] for kind in ("static", "balanced", "noise_floor"))
    # The floor is an estimate for choices that are drawn independently; real ones may lie a little below it.
    avoidable = min(1.0, (static - balanced) / (static - floor)) if static > floor else 0.0
    times = summary["step_ms"]
    rows = {
        "PAR left alone": f"{static:.3f}",
        "PAR balanced": f"{balanced:.3f}   (token noise alone: about {floor:.3f})",
        "avoidable imbalance removed": f"{avoidable:.0%}",
        "layers switched": f"{summary['layers_switched']} times, while serving",
        "moved": f"{summary['experts_moved']} experts, {summary['bytes_moved'] / 1e6:.1f} MB",
        "largest output difference": f"{summary['max_abs_output_diff']:.2g}"
        f"   (float32 rounding allows {summary['float32_rounding_bound']:.2g})",
        "step ms with agent": "p50 {p50:.2f}, p99 {p99:.2f}".format(**times["with_agent"]),
        "step ms without": "p50 {p50:.2f}, p99 {p99:.2f}".format(**times["without_agent"]),
        "steps x ranks x layers": f"{summary['steps']} x {summary['ranks']} x {summary['layers']}",
    }
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown


def _quantiles(milliseconds_T: Float64) -> dict[str, float]:
    p50, p99 = np.quantile(milliseconds_T, [0.5, 0.99]) if milliseconds_T.size else (0.0, 0.0)
    return {"p50": float(p50), "p99": float(p99)}
