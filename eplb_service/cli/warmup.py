"""``eplb warmup``, and progress on stderr while kernels are compiled: which one, and how many so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from eplb_service.cli.options import takes_options

_LINE_SECONDS = 5.0
"""Between two lines where stderr is no terminal."""


@takes_options()
def warmup() -> None:
    """Compile the solver once, so that later starts need not (an image is built with this)."""
    began = time.perf_counter()
    compile_solver()
    typer.echo(f"solver compiled and cached in {time.perf_counter() - began:.1f} s")


def compile_solver() -> None:
    """Compile the whole solver where it is not yet cached, before several processes use it."""
    from eplb_service.solver.warmup import warm_up

    with compile_progress():
        warm_up(threads=1)


@contextmanager
def compile_progress() -> Iterator[None]:
    """Within it, kernels that are compiled are named and counted on stderr; nothing is shown where all are cached.

    A terminal shows one line that changes, anything else a line at the beginning, every five seconds and at the end.
    """
    from eplb_service.solver.jit import compilations

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    status = console.status("") if console.is_terminal else None
    began, shown, compiled = time.monotonic(), 0.0, 0

    def report(kernel: str) -> None:
        nonlocal began, shown, compiled
        now = time.monotonic()
        if compiled == 0:
            began = now
            if status is not None:
                status.start()
        compiled += 1
        text = f"compiling the solver, once per machine: kernel {compiled}, {kernel} ({now - began:.0f} s)"
        if status is not None:
            status.update(text)
        elif now - shown >= _LINE_SECONDS:
            shown = now
            console.print(text)

    try:
        with compilations(report):
            yield
    finally:
        if status is not None:
            status.stop()
    if compiled:
        kernels = "1 kernel" if compiled == 1 else f"{compiled} kernels"
        console.print(f"compiled {kernels} of the solver, cached for later commands")
