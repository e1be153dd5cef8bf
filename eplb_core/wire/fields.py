"""Bounds on message fields, expressed as annotations of the corresponding dataclass fields.

Each annotation is a function that takes a value, the field's name and the deployment's sizes. It returns the value, or
raises ``WireError`` with the field's name. Names with control characters are rejected. Free text, such as a reason, is
cleaned instead, because nothing depends on its content.
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
"""Bound on ranks x layers x experts x table entries. DeepSeek-V3 on 320 ranks has 4.8 million if D is 1."""
MAX_LAYER_ENTRIES = 1 << 18
"""Bound on layers x experts and on layers x ranks. The service stores arrays of both sizes for every
step of a window."""
MAX_STEP = 1 << 48
"""Step numbers and step counts wrap around to 0 at this limit, after 8,900 years at 1,000 steps per second."""
MAX_VERSION = 1 << 62
"""Bound on epochs, plan ids and leader terms."""
MAX_DIGEST = 1 << 63
"""Bound on digests. Ranks compare them as signed 64-bit integers."""
MAX_BYTES = 1 << 50
"""Bound on byte counts: one pebibyte."""
MAX_MICROS = 1 << 48
"""Sums of microseconds wrap around to 0 at this limit, after nine years."""
MAX_SECONDS = 1e7
"""Bound on durations in seconds: about four months."""
MAX_TEXT = 256
"""Maximum length of a text field, in characters."""
MAX_LINE = 4096
"""Maximum length of a line that a service writes for operators, in characters."""

Sizes: TypeAlias = Mapping[str, int]
"""Sizes of the deployment, keyed by name, such as ``layers``. Fields of other messages must match them."""
Check: TypeAlias = Callable[[Any, str, Sizes], Any]
"""Function that checks a value and returns it. Its arguments are the value, the field's name and the sizes."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class WireError(ValueError):
    """A message is invalid. The error text names the field and the expected value."""


class ProtocolVersionError(WireError):
    """The peer uses a different version of the protocol."""


def check_count(value: int, field: str, limit: int, least: int = 0) -> int:
    """Return ``value``; raises ``WireError`` unless it is at least ``least`` and less than ``limit``."""
    if not least <= value < limit:
        raise WireError(f"{field} is {value}; expected {least} to {limit - 1}")
    return value


def check_deployment(name: str, field: str, _sizes: Sizes | None = None) -> str:
    """Return ``name``; raises ``WireError`` unless it is a valid deployment name."""
    if not _DEPLOYMENT.fullmatch(name):
        raise WireError(
            f"{field} is {name[:MAX_TEXT]!r}; a name has 1 to 63 letters, digits, '.', '_' or '-' and starts with "
            "a letter or digit"
        )
    return name


def check_name(name: str, field: str, _sizes: Sizes | None = None) -> str:
    """Return ``name``, which may be empty; raises ``WireError`` if it is too long or has control characters."""
    if len(name) > MAX_TEXT:
        raise WireError(f"{field} has {len(name)} characters; use at most {MAX_TEXT}")
    if not name.isprintable():
        raise WireError(f"{field} is {name!r}; remove the control characters")
    return name


def printable(text: str, longest: int = MAX_TEXT) -> str:
    r"""Make free text printable: truncate it to ``longest`` characters and replace control characters with spaces.

    Examples
    --------
    >>> printable("link lost\n\x1b[31mnow")
    'link lost  [31mnow'
    """
    return "".join(character if character.isprintable() else " " for character in text[:longest])


def below(limit: int | str, least: int = 0) -> Check:
    """Return a check for integers from ``least`` to ``limit - 1``; ``limit`` may be the name of a size."""
    return lambda value, field, sizes: check_count(
        value, field, sizes[limit] if isinstance(limit, str) else limit, least
    )


def _seconds(value: float, field: str, _sizes: Sizes) -> float:
    if not 0 <= value <= MAX_SECONDS:
        raise WireError(f"{field} is {value}; expected a finite number from 0 to {MAX_SECONDS:g}")
    return value


def each(size: str | None, limit: int) -> Check:
    """Return a check for lists of integers below ``limit``.

    Parameters
    ----------
    size
        Name of the size that the list's length must equal, such as ``"layers"``; ``None`` allows any length.
    limit
        Exclusive upper bound on the integers.
    """

    def check(values: Sequence[int], field: str, sizes: Sizes) -> Sequence[int]:
        if size is not None and len(values) != sizes[size]:
            raise WireError(
                f"{field}: expected one value for each of {sizes[size]} {size}, got {len(values)}"
            )
        if values:
            check_count(max(values), field, limit)
        return values

    return check


class _Clean:
    """Annotation for free text, which ``printable`` cleans when it is sent and when it is received."""

    def __call__(self, text: str, _field: str, _sizes: Sizes) -> str:
        return printable(text)

    def to_wire(self, text: str) -> str:
        """Return the text to send."""
        return printable(text)


class _Wrapping:
    """Annotation for counters that wrap around to 0 when they reach a limit.

    Hosts own these counters, so memory corruption in a host can produce any number. Rejecting an out-of-range number
    would not help, because the rank would reconnect with the same number. All ranks wrap in the same way, so equal
    numbers stay equal.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, value: int, _field: str, _sizes: Sizes) -> int:
        return self.to_wire(value)

    def to_wire(self, value: int) -> int:
        """Return the count to send."""
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
