"""Replays of many traces under many settings: each trace with each setting is a piece of work of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from eplb_service.io.open_trace import naming
from eplb_service.replay.jobs import TraceFile, completed, cores, replay, sparing
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
    """

    file: TraceFile
    scene: Scene
    jobs: tuple[Job, ...]
    varied: Mapping[str, Any]


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
    workers = min(workers or cores(), len(cells))
    if ray is None:
        cells = [replace(cell, jobs=tuple(sparing(cell.jobs, workers))) for cell in cells]
    return completed(_run_cell, [(cell,) for cell in cells], workers, ray)


def _run_cell(cell: SweepCell) -> Replay:
    """Open the trace and replay it; errors name it."""
    trace = cell.file.open()
    with naming(cell.file.path):
        found = replay(trace, cell.jobs, cell.scene)
    if found.interrupted:
        raise KeyboardInterrupt
    return found
