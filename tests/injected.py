"""Where a test may raise an error between two lines of a program, as a failing allocation would."""

from __future__ import annotations

import linecache
from types import FrameType


def leaves_a_with(frame: FrameType) -> bool:
    """Return whether the line that is about to run is the end of a ``with`` block.

    Python reports the line of the ``with`` statement once more before it calls ``__exit__``. An error that a trace
    function raises there skips ``__exit__``: a lock would stay held for ever, which no error of the program can cause.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    if not line.startswith(("with ", "async with ")):
        return False
    begins = min(start for start, _, number in frame.f_code.co_lines() if number == frame.f_lineno)
    return frame.f_lasti > begins
