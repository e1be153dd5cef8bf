"""``eplb warmup``, and what each command that solves does first: compile the solver where it is not cached yet."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from eplb_service.cli.options import takes_options


@takes_options()
def warmup() -> None:
    """Compile the solver once, so that later starts need not (an image is built with this)."""
    began = time.perf_counter()
    compile_solver()
    typer.echo(f"solver compiled and cached in {time.perf_counter() - began:.1f} s")


def compile_solver() -> None:
    """Compile the whole solver where it is not yet cached; a terminal shows on stderr which kernel it is at."""
    from eplb_core.solver.jit import compilations
    from eplb_core.solver.warmup import warm_up

    status = Console(stderr=True, highlight=False).status("loading the solver")
    with (
        status,
        compilations(lambda kernel: status.update(f"compiling the solver, once per machine: {kernel}")),
    ):
        warm_up(threads=1)
