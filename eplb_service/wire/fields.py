"""What a field of a message may hold: the bounds, and the checks that refuse everything else by the field's name.

Each check returns what it was given, so that a decoder reads as a list of its fields. Names are refused where they
are not printable; free text, such as a reason, is cleaned instead, for nothing depends on what it says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from google.protobuf.message import Message

MOST_LAYERS = 512
MOST_EXPERTS = 4096
MOST_RANKS = 4096
MOST_SLOTS = 512
MOST_TABLE_ENTRIES = 1 << 25
"""Bound on ranks x layers x experts x table entries: 320 ranks of DeepSeek-V3 have 4.8 million for one entry."""
MOST_LAYER_ENTRIES = 1 << 18
"""Bound on layers x experts and on layers x ranks, both kept for every step of a window."""
MOST_WINDOW_STEPS = 1 << 16
"""Bound on the steps of a window."""
LAST_STEP = 1 << 48
"""Bound on step numbers and counts of steps: a thousand steps per second for 8,900 years."""
LAST_VERSION = 1 << 62
"""Bound on epochs, plan ids and leader terms."""
LAST_DIGEST = 1 << 63
"""Bound on digests: ranks compare them as signed 64-bit integers."""
MOST_BYTES = 1 << 50
"""Bound on counts of bytes: a petabyte."""
LAST_MICROS = 1 << 48
"""Bound on sums of microseconds: nine years."""
LONGEST_SECONDS = 1e7
"""Bound on durations: four months."""
LONGEST_TEXT = 256
"""Characters in one text."""
LONGEST_MESSAGE = 4096
"""Characters in one line that a service writes for operators."""
LAST_TIME = float(1 << 36)
"""Bound on points in time, in seconds since 1970: the year 4147."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class WireError(ValueError):
    """A message that does not say what it must; the text names the field and what was expected."""


class ProtocolVersionError(WireError):
    """The peer speaks another version of the protocol."""


def check_count(value: int, field: str, limit: int, least: int = 0) -> int:
    """``value``, if it is ``least`` to ``limit - 1``."""
    if not least <= value < limit:
        raise WireError(f"{field} is {value}; it must be {least} to {limit - 1}")
    return value


def check_stated_bytes(message: Message, field: str, of: str) -> int | None:
    """Bytes that a message, called ``of``, may state; ``None`` where it does not."""
    if not message.HasField(field):
        return None
    return check_count(getattr(message, field), f"{of}.{field}", MOST_BYTES)


def check_seconds(value: float, field: str) -> float:
    """``value``, if it is a duration."""
    if not (math.isfinite(value) and 0 <= value <= LONGEST_SECONDS):
        raise WireError(f"{field} is {value}; it must be 0 to {LONGEST_SECONDS:g} seconds")
    return value


def check_finite(value: float, field: str) -> float:
    """``value``, if it is a finite number."""
    if not math.isfinite(value):
        raise WireError(f"{field} is {value}; it must be a finite number")
    return value


def check_ratio(value: float, field: str) -> float:
    """``value``, if it is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise WireError(f"{field} is {value}; it must be a finite number, zero or more")
    return value


def check_measured(value: float, field: str) -> float:
    """``value``, if it is a ratio, or NaN where there was nothing to measure."""
    return value if math.isnan(value) else check_ratio(value, field)


def check_time(value: float, field: str) -> float:
    """``value``, if it is a point in time."""
    if not 0 <= value <= LAST_TIME:
        raise WireError(f"{field} is {value}; it must be 0 to {LAST_TIME:g} seconds since 1970")
    return value


def check_epochs(values: Sequence[int], layers: int, field: str) -> tuple[int, ...]:
    """``values``, if there is one epoch for each of ``layers`` layers."""
    if len(values) != layers:
        raise WireError(f"{field}: expected one for each of {layers} layers, got {len(values)}")
    if layers and max(values) >= LAST_VERSION:
        raise WireError(f"{field}: epoch {max(values)} is past {LAST_VERSION}")
    return tuple(values)


def check_deployment(name: str, field: str) -> str:
    """``name``, if a deployment can be called so."""
    if not _DEPLOYMENT.fullmatch(name):
        raise WireError(
            f"{field} is {name[:LONGEST_TEXT]!r}; a name has 1 to 63 letters, digits, '.', '_' or '-' and starts with "
            "a letter or digit"
        )
    return name


def check_name(name: str, field: str) -> str:
    """``name``, if it is printable and not too long; may be empty."""
    if len(name) > LONGEST_TEXT:
        raise WireError(f"{field} has {len(name)} characters; at most {LONGEST_TEXT} are taken")
    if not name.isprintable():
        raise WireError(f"{field} is {name!r}; control characters are not taken")
    return name


def printable(text: str, longest: int = LONGEST_TEXT) -> str:
    """Free text cut to ``longest`` characters, with a space for whatever a terminal could act on."""
    return "".join(character if character.isprintable() else " " for character in text[:longest])
