"""Others' balancers along the same course: each decides at the end of every window, and is scored on the next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.decide.heat import Course
from benchmarks.decide.served import Row
from eplb_service.bench.closed_loop import Course as Loop
from eplb_service.bench.closed_loop import Entrant, cpu_after_first, loops, realised_mean
from eplb_service.bench.contest import Contest


def peer_rows(course: Course, contest: Contest) -> Iterator[Row]:
    """A row for each peer, over the windows that ours are scored on; one that fails is left out."""
    loop = Loop(course.name, course.heat_TLE, course.ranks, course.slots, course.window)
    for row in loops(contest, [loop], [Entrant(name, name) for name in contest.peers]):
        moves = row["moves"][1:]
        yield Row(row["policy"], realised_mean(row), float(np.mean(moves)), len(moves), cpu_after_first(row))
