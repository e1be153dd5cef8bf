"""Read a trace format of your own.

Run it from the repository root: ``python examples/own_trace_format.py``.

To make every ``eplb`` command open such files, put the reader into a package that declares it as an entry point::

    [project.entry-points."eplb.formats"]
    lines = "own_trace_format:read_lines"
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from eplb_service import solve
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.trace import ArrayTrace, Trace, TraceFacts

LINES = """\
90 30 20 10  5  5  3  2
80 35 25 10  4  6  2  3
95 28 18 12  6  5  4  1
"""


def read_lines(path: Path, read_as: ReadAs) -> Trace | None:
    """Read a file with one step per line and one token count per expert, for a model with one layer.

    Returns ``None`` if the file has a different format, so that the next reader is tried.
    """
    if path.suffix != ".lines":
        return None
    read_as.refuse_unused("a file of lines", "experts")
    counts_TE = np.loadtxt(path, dtype=np.int64, ndmin=2)
    return ArrayTrace(counts_TE[:, None], TraceFacts("lines"))


def main() -> None:
    """Write a small file in this format, read it, and place its 8 experts on 4 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heat.lines"
        path.write_text(LINES)
        trace = read_lines(path, ReadAs())
    assert trace is not None
    heat_TLE = trace.heat(0, trace.steps)
    print(f"heat {heat_TLE.shape}: {heat_TLE[0, 0].tolist()} in the first step")
    solution = solve(heat_TLE, ranks=4, slots=3)
    print(f"PAR {solution.par_before:.3f} before, {solution.par_after:.3f} promised after")


if __name__ == "__main__":
    main()

# Output:
#   heat (3, 1, 8): [90, 30, 20, 10, 5, 5, 3, 2] in the first step
#   PAR 1.701 before, 1.162 promised after
