"""Replay many traces under many settings. Each combination of a trace and settings is one task."""

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
    """One trace with one choice of settings.

    Parameters
    ----------
    file
        The trace.
    scene
        Ranks, costs and initial placement.
    jobs
        The baseline and the policies of one setup.
    varied
        Values of the varied settings, keyed by name; empty if no setting is varied.
    """

    file: TraceFile
    scene: Scene
    jobs: tuple[Job, ...]
    varied: Mapping[str, Any]


def grid(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the settings' values, varying the last setting fastest.

    Examples
    --------
    >>> grid({"min_gain": [0.0, 0.1], "seed": [1]})
    [{'min_gain': 0.0, 'seed': 1}, {'min_gain': 0.1, 'seed': 1}]
    >>> grid({})
    [{}]
    """
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def sweep(
    cells: Sequence[SweepCell], workers: int | None = None, ray: str | None = None
) -> Iterator[tuple[int, Replay]]:
    """Replay all cells in several processes or on a Ray cluster.

    Closing the iterator stops the work.

    Parameters
    ----------
    cells
        Traces and settings to replay.
    workers
        Number of processes; ``None`` for one per core.
    ray
        Address of a Ray cluster to use instead of processes.

    Yields
    ------
    tuple of int and Replay
        Index of a cell and its results, in completion order.

    Raises
    ------
    ReplayError
        If a process or a node fails. Exceptions from a replay are also raised, and their messages name the trace.
    """
    workers = min(workers or cores(), len(cells))
    if ray is None:
        cells = [replace(cell, jobs=tuple(sparing(cell.jobs, workers))) for cell in cells]
    return completed(_run_cell, [(cell,) for cell in cells], workers, ray)


def _run_cell(cell: SweepCell) -> Replay:
    """Open the trace and replay it. Error messages name the trace."""
    trace = cell.file.open()
    with naming(cell.file.path):
        result = replay(trace, cell.jobs, cell.scene)
    if result.interrupted:
        raise KeyboardInterrupt
    return result
