"""Bounds of the messages' fields, stated as annotations of the dataclass fields that hold them.

An annotation is a check: it takes a value, the field's name and the sizes of the deployment, and returns the value or
raises ``WireError`` naming the field. Names are refused where they are not printable; free text, such as a reason, is
cleaned instead, for nothing depends on what it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_RANKS = 4096
MAX_SLOTS = 512
MAX_TABLE_ENTRIES = 1 << 25
"""Bound on ranks x layers x experts x table entries: 320 ranks of DeepSeek-V3 have 4.8 million for one entry."""
MAX_LAYER_ENTRIES = 1 << 18
"""Bound on layers x experts and on layers x ranks, both kept for every step of a window."""
MAX_STEP = 1 << 48
"""Step numbers and step counts wrap to 0 at this limit, after 8,900 years at 1,000 steps per second."""
MAX_VERSION = 1 << 62
"""Bound on epochs, plan ids and leader terms."""
MAX_DIGEST = 1 << 63
"""Bound on digests: ranks compare them as signed 64-bit integers."""
MAX_BYTES = 1 << 50
"""Bound on counts of bytes: a petabyte."""
MAX_MICROS = 1 << 48
"""Sums of microseconds wrap to 0 at this limit, after nine years."""
MAX_SECONDS = 1e7
"""Bound on durations: four months."""
MAX_TEXT = 256
"""Characters in one text."""
MAX_LINE = 4096
"""Characters in one line that a service writes for operators."""

Sizes: TypeAlias = Mapping[str, int]
"""Sizes of the deployment by name, that other fields must agree with."""
Check: TypeAlias = Callable[[Any, str, Sizes], Any]
"""Checks a value by its field's name."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class WireError(ValueError):
    """A message that does not say what it must; the text names the field and what was expected."""


class ProtocolVersionError(WireError):
    """The peer speaks another version of the protocol."""


def check_count(value: int, field: str, limit: int, least: int = 0) -> int:
    """Return ``value`` if it is ``least`` to ``limit - 1``."""
    if not least <= value < limit:
        raise WireError(f"{field} is {value}; it must be {least} to {limit - 1}")
    return value


def check_deployment(name: str, field: str, _sizes: Sizes | None = None) -> str:
    """Return ``name`` if a deployment can be called so."""
    if not _DEPLOYMENT.fullmatch(name):
        raise WireError(
            f"{field} is {name[:MAX_TEXT]!r}; a name has 1 to 63 letters, digits, '.', '_' or '-' and starts with "
            "a letter or digit"
        )
    return name


def check_name(name: str, field: str, _sizes: Sizes | None = None) -> str:
    """Return ``name`` if it is printable and not too long; may be empty."""
    if len(name) > MAX_TEXT:
        raise WireError(f"{field} has {len(name)} characters; at most {MAX_TEXT} are taken")
    if not name.isprintable():
        raise WireError(f"{field} is {name!r}; control characters are not taken")
    return name


def printable(text: str, longest: int = MAX_TEXT) -> str:
    """Cut free text to ``longest`` characters, with a space for whatever a terminal could act on."""
    return "".join(character if character.isprintable() else " " for character in text[:longest])


def below(limit: int | str, least: int = 0) -> Check:
    """Whole numbers from ``least`` on, below a limit or the size of that name."""
    return lambda value, field, sizes: check_count(
        value, field, sizes[limit] if isinstance(limit, str) else limit, least
    )


def _seconds(value: float, field: str, _sizes: Sizes) -> float:
    if not 0 <= value <= MAX_SECONDS:
        raise WireError(f"{field} is {value}; it must be a finite number, 0 to {MAX_SECONDS:g}")
    return value


def each(size: str | None, limit: int) -> Check:
    """One whole number below ``limit`` for each of the layers, ranks or steps that there are; ``None``: any number."""

    def check(values: Sequence[int], field: str, sizes: Sizes) -> Sequence[int]:
        if size is not None and len(values) != sizes[size]:
            raise WireError(f"{field}: expected one for each of {sizes[size]} {size}, got {len(values)}")
        if values:
            check_count(max(values), field, limit)
        return values

    return check


class _Clean:
    """Free text, cleaned by ``printable`` on both sides."""

    def __call__(self, text: str, _field: str, _sizes: Sizes) -> str:
        """Return the text, cleaned."""
        return printable(text)

    def sent(self, text: str) -> str:
        """Return the text as it travels."""
        return printable(text)


class _Wrapping:
    """Counters that begin at 0 again when they reach a limit.

    Hosts own these counters, and overwritten memory can hold any number. A number out of bounds
    makes a rank's heat useless. Closing its stream would not help, because the rank would reconnect with the same
    number. All ranks wrap in the same way, so equal numbers stay equal.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, value: int, _field: str, _sizes: Sizes) -> int:
        """Return the count within its bounds."""
        return self.sent(value)

    def sent(self, value: int) -> int:
        """Return the count as it travels."""
        return int(value) % self._limit


Step = Annotated[int, _Wrapping(MAX_STEP)]
Version = Annotated[int, below(MAX_VERSION)]
Digest = Annotated[int, below(MAX_DIGEST)]
Bytes = Annotated[int, below(MAX_BYTES)]
Micros = Annotated[int, _Wrapping(MAX_MICROS)]
Layer = Annotated[int, below(MAX_LAYERS)]
LayerEpochs = Annotated[tuple[int, ...], each("layers", MAX_VERSION)]
Seconds = Annotated[float, _seconds]
Deployment = Annotated[str, check_deployment]
Name = Annotated[str, check_name]
Text = Annotated[str, _Clean()]
