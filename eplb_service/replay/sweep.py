"""Replays of many traces under many settings: each trace with each setting is a piece of work of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from eplb_service.io.open_trace import naming
from eplb_service.replay.jobs import Job, Scene, TraceFile
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import replay, with_threads
from eplb_service.replay.workers import cores, in_processes, on_ray


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
        yield from on_ray(run_cell, [(cell,) for cell in cells], ray)
        return
    workers = min(workers or cores(), len(cells))
    threads = max(1, cores() // workers)
    sparing = [replace(cell, jobs=tuple(with_threads(job, threads) for job in cell.jobs)) for cell in cells]
    if workers == 1:
        yield from run_cells(list(enumerate(sparing)))
        return
    yield from in_processes(run_cells, [(share,) for share in _shares(sparing, workers)])


def run_cell(cell: SweepCell) -> Replay:
    """Open the trace and replay it; errors name it."""
    trace = cell.file.open()
    with naming(cell.file.path):
        return replay(trace, cell.jobs, cell.scene)


def run_cells(numbered: Sequence[tuple[int, SweepCell]]) -> Iterator[tuple[int, Replay]]:
    """One after another."""
    for number, cell in numbered:
        yield number, run_cell(cell)


def _shares(cells: Sequence[SweepCell], workers: int) -> list[list[tuple[int, SweepCell]]]:
    """All cells in shares of about the same effort: the longest first, each to who has least."""
    shares: list[list[tuple[int, SweepCell]]] = [[] for _ in range(workers)]
    efforts = [0.0] * workers
    for number, cell in sorted(enumerate(cells), key=lambda one: -one[1].effort):
        least = efforts.index(min(efforts))
        shares[least].append((number, cell))
        efforts[least] += cell.effort
    return shares
