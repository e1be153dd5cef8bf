"""How all plots look: one colour for each policy, quiet axes, letters that stay letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.lines
from matplotlib.figure import Figure

from eplb_service.bench.closed_loop import FULL
from eplb_service.bench.contest import OURS, OURS_EVEN
from eplb_service.bench.peers.balancers import FLASHLB

COLOURS = {
    OURS: "#1d4ed8",
    FULL.label: "#7aa7f0",
    OURS_EVEN: "#06b6d4",
    FLASHLB: "#ea580c",
    "Swift": "#a21caf",
    "Ascend default": "#854d0e",
    "vLLM default": "#15803d",
    "SGLang deepseek": "#0e7490",
    "SGLang deepseek_vec": "#64748b",
}
INK = "#1f2937"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "eplb-service",
    # Letters as text: smaller, and sharp at any size.
    "svg.fonttype": "none",
}


def legend_above(figure: Figure, policies: Sequence[str]) -> None:
    """A legend of policies over all axes."""
    handles = [
        matplotlib.lines.Line2D([], [], marker="o", ls="", color=COLOURS[policy], label=policy)
        for policy in policies
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles) if len(handles) < 8 else 4, fontsize=9
    )
