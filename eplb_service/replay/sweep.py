"""Replays of many traces under many settings: each trace with each setting is a piece of work of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from eplb_service.io.open_trace import naming
from eplb_service.replay.jobs import TraceFile, cores, in_processes, on_ray, replay, shared_out, with_threads
from eplb_service.replay.loop import Scene
from eplb_service.replay.policy import Job
from eplb_service.replay.result import Replay


@dataclass(frozen=True)
class SweepCell:
    """One trace under one choice of settings.

    Parameters
    ----------
    file
        The trace.
    scene
        Ranks, costs, and where weights are at the start.
    jobs
        One setup's baseline and policies.
    varied
        The settings that were chosen, by name; empty where none is varied.
    effort
        About how much work it is beside the others.
    """

    file: TraceFile
    scene: Scene
    jobs: tuple[Job, ...]
    varied: Mapping[str, Any]
    effort: float = 1.0


def grid(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of each setting, the last name's fastest; one without any where none is named."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def sweep(
    cells: Sequence[SweepCell], workers: int | None = None, ray: str | None = None
) -> Iterator[tuple[int, Replay]]:
    """Replay all cells on ``workers`` processes, all cores by default, or on the Ray cluster at ``ray``.

    Yields each cell's number and what was found, as they are done. Raises what a replay raises, naming the trace, and
    ``ReplayError`` where a process or node dies. Closing the iterator ends the work.
    """
    if ray is not None:
        yield from on_ray(_run_cell, [(cell,) for cell in cells], ray)
        return
    workers = min(workers or cores(), len(cells))
    threads = max(1, cores() // workers)
    sparing = [replace(cell, jobs=tuple(with_threads(job, threads) for job in cell.jobs)) for cell in cells]
    if workers == 1:
        yield from _run_cells(list(enumerate(sparing)))
        return
    shares = shared_out(enumerate(sparing), workers, lambda entry: entry[1].effort)
    yield from in_processes(_run_cells, [(share,) for share in shares])


def _run_cell(cell: SweepCell) -> Replay:
    """Open the trace and replay it; errors name it."""
    trace = cell.file.open()
    with naming(cell.file.path):
        return replay(trace, cell.jobs, cell.scene)


def _run_cells(numbered: Sequence[tuple[int, SweepCell]]) -> Iterator[tuple[int, Replay]]:
    for number, cell in numbered:
        yield number, _run_cell(cell)
