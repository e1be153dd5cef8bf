"""JSON documents, of a size that is bounded."""

from __future__ import annotations

import json
from pathlib import Path

from eplb_service.heat.window import HeatError

_MOST_TEXT_BYTES = 4 << 30


def read_json(path: Path) -> object:
    """The document of a ``.json``; raises ``HeatError`` (without the path) where it is none."""
    check_size(path)
    try:
        return json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise HeatError(f"is not JSON, or truncated ({error})") from error
    except ValueError as error:
        raise HeatError(f"holds a number that cannot be read ({error})") from error


def check_size(path: Path) -> None:
    """Raise ``HeatError`` where a text file is too large to be read."""
    if path.stat().st_size > _MOST_TEXT_BYTES:
        raise HeatError(f"is {path.stat().st_size / 2**30:.0f} GiB of text; convert it to .npy first")
