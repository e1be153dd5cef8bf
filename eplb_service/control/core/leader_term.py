"""Leader terms: which of two services the ranks follow.

A term is the clock in seconds, then random bits, so that no two services have the same. Ranks refuse plans of a term
lower than the highest of which they have heard.
"""

from __future__ import annotations

import datetime

from eplb_service.control.core.errors import ConflictError
from eplb_service.wire.fields import LAST_VERSION

RANDOM_BITS = 20
"""Low bits of a term that are drawn at random."""
_LAST_CLOCK = 1 << 36
"""Bound on what a clock is taken to say, in seconds: the year 4147."""


def term_at(seconds: float, random_bits: int) -> int:
    """The term of a service that starts at ``seconds`` since 1970; ``random_bits`` are its low bits."""
    return min(max(int(seconds), 0), _LAST_CLOCK) << RANDOM_BITS | random_bits


def term_above(term: int, random_bits: int) -> int:
    """A term that ranks follow which have followed ``term``; raises ``ConflictError`` where there is none."""
    above = ((term >> RANDOM_BITS) + 1) << RANDOM_BITS | random_bits
    if above >= LAST_VERSION:
        raise ConflictError(
            f"there is no leader term above {term}: a service has claimed the last one; start the engines again, "
            "with which their agents forget it"
        )
    return above


def clock_of(term: int) -> str:
    """When the service of a term started, by its own clock."""
    seconds = term >> RANDOM_BITS
    if seconds > _LAST_CLOCK:
        return "past the year 4147"
    return f"{datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
