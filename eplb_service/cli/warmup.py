"""``eplb warmup``: compile the solver's kernels into their cache on disk, so that no decision waits for them."""

from __future__ import annotations

import time

import typer
from rich.console import Console


def warmup() -> None:
    """Compile the solver once, so that later starts need not (an image is built with this)."""
    typer.echo(f"solver compiled and cached in {compile_solver():.1f} s")


def compile_solver() -> float:
    """Make one decision of each policy on a toy layer; returns the seconds that took, next to none once cached."""
    with Console(stderr=True).status("compiling the solver, once per machine"):
        return _timed_toy_decisions()


def _timed_toy_decisions() -> float:
    began = time.perf_counter()
    from eplb_service.heat.synthetic import synthetic_heat
    from eplb_service.offline import solve
    from eplb_service.planner.settings import POLICIES

    heat_TLE = synthetic_heat("phased", steps=64, layers=2, experts=16, tokens=256, top_k=2)
    for policy in POLICIES:
        solve(heat_TLE, ranks=4, slots=6, policy=policy)
    return time.perf_counter() - began
