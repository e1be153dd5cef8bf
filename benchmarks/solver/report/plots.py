"""The results of a run as plots in SVG; needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

import matplotlib
from matplotlib.figure import Figure

from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.report.loop_plots import draw_ablation, draw_loop, draw_pareto
from benchmarks.solver.report.snapshot_plots import draw_balance, draw_scaling, draw_time
from benchmarks.solver.report.style import STYLE
from benchmarks.solver.targets import Results


def plots(results: Results) -> dict[str, bytes]:
    """SVG files by name, one for each measurement that was made."""
    drawers: Mapping[str, Callable[[Rows], Figure]] = {
        "cells": draw_balance,
        "time": draw_time,
        "loop": draw_loop,
        "pareto": draw_pareto,
        "scaling": draw_scaling,
        "ablation": draw_ablation,
    }
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in drawers.items():
            if results.get(name):
                buffer = io.BytesIO()
                draw(results[name]).savefig(buffer, format="svg", metadata={"Date": None})
                drawn[f"{name}.svg"] = buffer.getvalue()
    return drawn
