"""Plots of single decisions: balance, CPU time, and how that grows."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.heat_kinds import KINDS
from benchmarks.solver.report.style import COLOURS, INK, legend_above
from eplb_service.bench.contest import NONE, OURS
from eplb_service.bench.peers.balancers import FLASHLB


def draw_balance(rows: Rows) -> Figure:
    """For each shape and kind, every policy's ratio on its window and on the next."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    seed = rows[0]["seed"]
    here = [row for row in rows if row["seed"] == seed and row["policy"] != NONE]
    policies = list(dict.fromkeys(row["policy"] for row in here))
    figure = Figure(figsize=(10, 1.2 + 0.75 * len(shapes)), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 4, sharey=True), KINDS, strict=True):
        for number, shape in enumerate(shapes):
            for row in here:
                if (row["shape"], row["kind"]) == (shape, kind):
                    y = number + (policies.index(row["policy"]) / max(1, len(policies) - 1) - 0.5) * 0.6
                    colour = COLOURS[row["policy"]]
                    axes.plot([row["in_sample"], row["next_window"]], [y, y], color=colour, lw=1.2, alpha=0.5)
                    axes.plot(row["in_sample"], y, "o", color=colour, ms=4.5)
                    axes.plot(row["next_window"], y, "o", mfc="white", mec=colour, ms=4.5)
        axes.set_title(kind)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(shapes)), shapes)
    figure.axes[0].invert_yaxis()
    figure.supxlabel(
        "peak-to-average ratio per step, ours through its tables: filled on its window, hollow on the next"
    )
    legend_above(figure, policies)
    return figure


def draw_time(rows: Rows) -> Figure:
    """CPU seconds by kind, minima of the repeats; the number above FlashLB says how many times ours it is."""
    shapes = [
        shape
        for shape in dict.fromkeys(row["shape"] for row in rows)
        if len({row["policy"] for row in rows if row["shape"] == shape}) > 1
    ]
    if not shapes:
        shapes = list(dict.fromkeys(row["shape"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, shape in zip(np.atleast_1d(figure.subplots(1, len(shapes))), shapes, strict=True):
        spent = {
            (row["policy"], row["kind"]): min(row["cpu_seconds"]) for row in rows if row["shape"] == shape
        }
        width = 0.85 / len(policies)
        for number, policy in enumerate(policies):
            for at, kind in enumerate(KINDS):
                if (policy, kind) not in spent:
                    continue
                x = at + (number - (len(policies) - 1) / 2) * width
                axes.bar(x, spent[policy, kind] * 1e3, width * 0.9, color=COLOURS[policy])
                if policy == FLASHLB and (OURS, kind) in spent:
                    ratio = spent[policy, kind] / spent[OURS, kind]
                    axes.annotate(
                        f"{ratio:.1f}×",
                        (x, spent[policy, kind] * 1e3),
                        xytext=(0, 2),
                        textcoords="offset points",
                        ha="center",
                        fontsize=8.5,
                    )
        axes.set_title(f"{shape}: one decision for all layers")
        axes.set_xticks(range(len(KINDS)), KINDS)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("CPU milliseconds")
    legend_above(figure, policies)
    return figure


def draw_scaling(rows: Rows) -> Figure:
    """CPU seconds as one dimension grows, both axes logarithmic, beside a straight line."""
    curves = list(dict.fromkeys(row["grows"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, grows in zip(np.atleast_1d(figure.subplots(1, len(curves), sharey=True)), curves, strict=True):
        for policy in policies:
            here = [row for row in rows if (row["grows"], row["policy"]) == (grows, policy)]
            sizes, seconds = [row["size"] for row in here], [row["cpu_seconds"] for row in here]
            axes.plot(
                sizes,
                seconds,
                "o-",
                color=COLOURS[policy],
                ms=4,
                lw=2.2 if policy == OURS else 1.2,
                zorder=3 if policy == OURS else 2,
            )
            if policy == OURS and seconds:
                straight = [seconds[0] * size / sizes[0] for size in sizes]
                axes.plot(sizes, straight, ":", color=INK, lw=1, zorder=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row["size"] for row in rows if row["grows"] == grows})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{grows} grow")
        axes.set_xlabel(f"{grows}; dotted: linear from ours")
    figure.axes[0].set_ylabel("CPU seconds of one decision")
    legend_above(figure, policies)
    return figure
