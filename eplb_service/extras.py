"""Extras of the distribution: the command that installs what one of them needs."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

_OF_EXTRA = re.compile(r"""(?P<requirement>[^;]+);.*\bextra == ["'](?P<extra>[\w-]+)["']""")
_DISTRIBUTION = "eplb-service"


def install_command(extra: str) -> str:
    """Return the ``pip`` command that installs the packages of an extra.

    It names these packages, not ``eplb-service``, so that it works wherever ``eplb-service`` itself came from.
    """
    try:
        stated = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        stated = []
    found = [
        match["requirement"].strip()
        for line in stated
        if (match := _OF_EXTRA.match(line)) and match["extra"] == extra
    ]
    if not found:
        return f"install what the extra {extra!r} of {_DISTRIBUTION} names"
    return f"pip install {' '.join(map(shlex.quote, found))}"
