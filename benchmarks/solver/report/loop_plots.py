"""Plots of the closed loop: window after window, balance against moves, each idea switched off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.heat_kinds import KINDS
from benchmarks.solver.report.style import COLOURS, INK, legend_above
from eplb_service.bench.closed_loop import (
    DEFAULT,
    FULL,
    LEFT_ALONE,
    cpu_after_first,
    moves_after_first,
    realised_mean,
)
from eplb_service.bench.contest import OURS
from eplb_service.bench.peers.balancers import FLASHLB


def draw_loop(rows: Rows) -> Figure:
    """Realised ratio window after window; what was moved for it is in the table."""
    kinds = list(dict.fromkeys(row["course"] for row in rows))
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    shown = [
        policy
        for policy in dict.fromkeys(row["policy"] for row in rows)
        if policy in (DEFAULT.label, FULL.label, FLASHLB, "Swift", "vLLM default")
    ]
    for axes, kind in zip(figure.subplots(2, 2).ravel(), kinds, strict=False):
        for row in rows:
            if row["course"] == kind and row["policy"] in shown:
                axes.plot(
                    range(1, len(row["realised"]) + 1),
                    row["realised"],
                    "o-",
                    color=COLOURS[row["policy"]],
                    ms=3.5,
                    lw=2 if row["policy"] == DEFAULT.label else 1.3,
                    zorder=3 if row["policy"] == DEFAULT.label else 2,
                )
        axes.set_title(kind)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("decision")
    figure.supylabel("peak-to-average ratio realised on the window that follows")
    legend_above(figure, shown)
    return figure


def draw_pareto(rows: Rows) -> Figure:
    """Realised ratio against the part of the slots that a decision moves."""
    kinds = list(dict.fromkeys(row["course"] for row in rows))
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    families = [OURS, FULL.label]
    for axes, kind in zip(np.atleast_1d(figure.subplots(1, len(kinds))), kinds, strict=True):
        points = []
        for row in rows:
            if row["course"] != kind or row["policy"] == LEFT_ALONE.label:
                continue
            decisions = max(1, len(row["moves"]) - 1)
            share = 100 * moves_after_first(row) / decisions / row["slots"]
            family = _family(row["policy"])
            if family not in families:
                families.append(family)
            points.append((family, row["policy"], share, realised_mean(row)))
        mine = sorted((share, ratio) for family, _, share, ratio in points if family == OURS)
        axes.plot(*zip(*mine, strict=True), color=COLOURS[OURS], lw=1.2, alpha=0.6)
        for family, policy, share, ratio in points:
            axes.plot(share, ratio, "o", color=COLOURS[family], ms=6)
            note = "default" if policy == DEFAULT.label else policy.partition("move_price ")[2]
            if note and (policy == DEFAULT.label or share > 0.2):
                axes.annotate(
                    note,
                    (share, ratio),
                    xytext=(0, -12 if policy == DEFAULT.label else 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                    color=COLOURS[OURS],
                )
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=-0.1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_title(f"{kind}: numbers are move_price")
        axes.set_xlabel("slots moved per decision, part of all")
    figure.axes[0].set_ylabel("realised peak-to-average ratio")
    legend_above(figure, families)
    return figure


def _family(policy: str) -> str:
    """Whose colour a policy with other settings has."""
    return policy if policy in COLOURS else policy.partition(", ")[0]


def draw_ablation(rows: Rows) -> Figure:
    """What switching a component off does to the realised ratio, the moves and the time of the closed loop."""
    ideas = [policy for policy in dict.fromkeys(row["policy"] for row in rows) if policy != DEFAULT.label]
    kind_colours = dict(zip(KINDS, ("#64748b", "#1d4ed8", "#15803d", "#ea580c"), strict=True))
    measures: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
        "change of the realised ratio": realised_mean,
        "slots moved per decision": lambda row: moves_after_first(row) / max(1, len(row["moves"]) - 1),
        "CPU seconds per decision": cpu_after_first,
    }
    figure = Figure(figsize=(10, 0.9 + 0.5 * len(ideas)), layout="constrained")
    for axes, (title, measure) in zip(figure.subplots(1, 3, sharey=True), measures.items(), strict=True):
        for number, kind in enumerate(KINDS):
            here = [row for row in rows if row["course"] == kind]
            found = {
                policy: float(np.mean([measure(row) for row in here if row["policy"] == policy]))
                for policy in dict.fromkeys(row["policy"] for row in here)
            }
            if not found:
                continue
            base = found[DEFAULT.label] if measure is realised_mean else 0.0
            height = [at + (number - 1.5) * 0.19 for at in range(len(ideas))]
            axes.barh(height, [found[idea] - base for idea in ideas], 0.17, color=kind_colours[kind])
            if not base:
                axes.axvline(found[DEFAULT.label], color=kind_colours[kind], lw=1, ls=":")
        axes.axvline(0, color=INK, lw=0.8)
        axes.set_title(title)
        axes.grid(axis="y", visible=False)
    figure.axes[0].set_yticks(range(len(ideas)), ideas)
    figure.axes[0].invert_yaxis()
    figure.supxlabel("each row: one component switched off; dotted: everything on")
    handles = [matplotlib.patches.Patch(color=colour, label=kind) for kind, colour in kind_colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure
