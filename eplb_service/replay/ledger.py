"""What the jobs of a replay have told so far: all that results are made of, and all that is needed to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eplb_service.replay.jobs import Done, Job, Progress


class Ledger:
    """Progress of each job, in order.

    Parameters
    ----------
    jobs
        Those that are run.
    told
        What an interrupted run has found of each; ``None`` to begin.
    """

    def __init__(self, jobs: Sequence[Job], told: Sequence[list[Progress]] | None = None) -> None:
        self.jobs = tuple(jobs)
        self.told = [list(done) for done in told] if told is not None else [[] for _ in jobs]

    @property
    def decisions(self) -> int:
        """Decisions of all jobs together."""
        return sum(map(len, self.told))

    def add(self, number: int, progress: Progress) -> None:
        """Job ``number`` has made its next decision; where it stood before is of no use any more."""
        told = self.told[number]
        told.append(progress)
        if len(told) > 1:
            told[-2] = replace(told[-2], standing=None)

    def done(self) -> list[Done]:
        """From where each job goes on."""
        return [Done(len(told), told[-1].standing) if told else Done() for told in self.told]
