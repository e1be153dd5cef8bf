"""``eplb warmup``, and the solver compilation that precedes every command that solves."""

from __future__ import annotations

import time

import typer
from rich.console import Console

from eplb_service.cli.options import takes_options


@takes_options()
def warmup() -> None:
    """Compile the solver once, so that later commands start faster. The container image build runs this command."""
    start = time.perf_counter()
    compile_solver()
    typer.echo(f"solver compiled and cached in {time.perf_counter() - start:.1f} s")


def compile_solver() -> None:
    """Compile the solver's kernels that are not cached yet. If stderr is a terminal, show the current kernel there."""
    from eplb_core.solver.jit import compilations
    from eplb_core.solver.warmup import warm_up

    status = Console(stderr=True, highlight=False).status("loading the solver")
    with (
        status,
        compilations(lambda kernel: status.update(f"compiling the solver, once per machine: {kernel}")),
    ):
        warm_up(threads=1)
