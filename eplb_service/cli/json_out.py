"""JSON for machines: on stdout, or into a file that is whole or not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eplb_service.atomic_write import write_atomically


def print_json(document: Mapping[str, Any]) -> None:
    """Write ``document`` to stdout, indented, numpy arrays as lists."""
    sys.stdout.write(to_json(document))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path`` in one step; raises ``OutputError`` where the disk refuses."""
    write_atomically(path, to_json(document).encode())


def to_json(document: Mapping[str, Any]) -> str:
    """Indented JSON with a newline at its end; NaN and infinity raise ``ValueError``, as JSON has none."""
    return json.dumps(document, indent=2, allow_nan=False, default=_plain) + "\n"


def _plain(value: object) -> object:
    # numpy arrays and scalars both know their plain Python form.
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return tolist()
