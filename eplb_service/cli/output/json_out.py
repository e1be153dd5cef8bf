"""JSON for machines: on stdout, or into a file that is whole or not there."""

from __future__ import annotations

import json
import math
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
    """Indented JSON with a newline at its end; a figure that there is not (NaN) is ``null``.

    Raises
    ------
    ValueError
        For infinity, which JSON has no form for.
    """
    return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """What JSON has a form for: numpy arrays and scalars as plain Python, NaN as ``None``."""
    if isinstance(value, Mapping):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")
