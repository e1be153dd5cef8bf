"""JSON Lines, read a record at a time: what recorders that append leave behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eplb_service.heat.window import HeatError
from eplb_service.io.containers.json_file import check_size


class Record(NamedTuple):
    """One record and where it is, for messages: ``line 3``, ``entry 2``."""

    place: str
    content: Mapping[str, Any]


def holds_lines(path: Path) -> bool:
    """Whether a text file holds a JSON object on its first line, and more after it."""
    check_size(path)
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        if not first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") or not any(line.strip() for line in file):
            return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a file; raises ``HeatError`` (without the path) naming the line that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                cut = (
                    ""
                    if line.endswith(b"\n")
                    else ": is it cut off, because its writer was stopped? remove it"
                )
                raise HeatError(f"line {number} is not JSON{cut or f' ({error})'}") from error
            yield _record(f"line {number}", content)


def records_of(entries: Iterable[object]) -> Iterator[Record]:
    """The records of a JSON list; raises ``HeatError`` naming the entry that is none."""
    for number, entry in enumerate(entries):
        yield _record(f"entry {number}", entry)


def _record(place: str, content: object) -> Record:
    if not isinstance(content, Mapping):
        raise HeatError(f"{place} holds a {type(content).__name__}; expected an object")
    return Record(place, content)
