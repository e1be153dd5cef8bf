"""Check whether a test may raise an error at a line of running code, as a failing allocation would."""

from __future__ import annotations

import linecache
from types import FrameType


def leaves_a_with(frame: FrameType) -> bool:
    """Return True if the next line event marks the end of a ``with`` block.

    Python reports the line of the ``with`` statement once more before it calls ``__exit__``. If a trace
    function raises there, Python skips ``__exit__`` and a lock stays held. An error that the program raises cannot
    have this effect.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    if not line.startswith(("with ", "async with ")):
        return False
    begins = min(start for start, _, number in frame.f_code.co_lines() if number == frame.f_lineno)
    return frame.f_lasti > begins
