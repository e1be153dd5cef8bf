"""Recorded traces as courses to serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eplb_service.bench.closed_loop import Course
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import read_heat


def recorded_course(path: Path, ranks: int, slots: int | None, window: int) -> Course:
    """A trace of any format that the project reads; one slot per rank beyond what the experts need, unless given.

    Token routes become steps of 64 requests side by side. Raises ``HeatError``, also where there are not three windows.
    """
    heat_TLE = read_heat(path, ReadAs(batch=64))
    needed = -(-heat_TLE.shape[2] // ranks)
    window = min(window, heat_TLE.shape[0] // 3)
    name = f"{path.parent.name}/{path.stem}"
    return Course(name, np.ascontiguousarray(heat_TLE), ranks, slots or needed + 1, window)
