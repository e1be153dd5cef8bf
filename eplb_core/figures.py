"""Readable numbers: significant digits only, with thousands separators and without exponents."""

from __future__ import annotations

import math
from decimal import Decimal

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def digits(value: float, most: int = 3, sign: str = "") -> str:
    """Return a number as text with a limited number of significant digits; a dash for NaN.

    Parameters
    ----------
    value
        The number.
    most
        Maximum number of significant digits.
    sign
        ``"+"`` to show the sign of positive numbers too.

    Examples
    --------
    >>> digits(3749.6), digits(3749.6, 5), digits(0.041234), digits(12, sign="+")
    ('3,750', '3,749.6', '0.0412', '+12')
    """
    return "-" if math.isnan(value) else format(Decimal(f"{value + 0.0:.{most}g}"), f"{sign},f")


def size_text(count: float) -> str:
    """Return a number of bytes with three digits and a decimal unit.

    Examples
    --------
    >>> size_text(1_234_567), size_text(999_600)
    ('1.23 MB', '1 MB')
    """
    unit = 0
    # 999.5 and above would be rounded to 1,000, so they get the next unit.
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    return f"{digits(count)} {_UNITS[unit]}"


def ratio_text(value: float) -> str:
    """Return a peak-to-average ratio as text, or a dash if nothing was measured or no token was served."""
    return f"{value:.3f}" if value > 0 else "-"


def duration_text(seconds: float) -> str:
    """Return a duration in its largest suitable unit.

    Examples
    --------
    >>> duration_text(90), duration_text(150)
    ('90 s', '2 min')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
