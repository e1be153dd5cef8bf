"""Figures for people: the digits that count, thousands apart, never an exponent."""

from __future__ import annotations

import math
from decimal import Decimal

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def digits(value: float, most: int = 3, sign: str = "") -> str:
    """``value`` to ``most`` significant digits, as 3,750 or 0.0412; a dash for NaN; ``sign`` is ``+`` or none."""
    return "-" if math.isnan(value) else format(Decimal(f"{value + 0.0:.{most}g}"), f"{sign},f")


def size_text(count: float) -> str:
    """Bytes in three digits and their unit, decimal."""
    unit = 0
    # From half below it on a thousand would be written in four digits.
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{digits(count)} {_UNITS[unit]}"
