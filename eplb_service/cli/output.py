"""Output of commands: tables that fit 80 columns, JSON, and progress on stderr."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from eplb_service.atomic_write import write_atomically


def output_console() -> Console:
    """Stdout as it is now: wrapped to the width of a terminal, in whole lines into a file or a pipe."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def compact_table(label: str, *numbers: str, title: str | None = None) -> Table:
    """A table without side borders: a column of text that wraps, then columns of numbers that are always whole."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(label, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def rows_table(rows: Sequence[Mapping[str, str]], title: str | None = None) -> Table:
    """A ``compact_table`` of rows that are all alike: cells by the headings of their columns."""
    table = compact_table(*rows[0], title=title)
    for row in rows:
        table.add_row(*row.values())
    return table


@contextmanager
def progress_bar(
    description: str, total: float | None, *columns: ProgressColumn
) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, which each call updates as rich's ``Progress.update`` does; without a terminal nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda **_: None
        return
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*shown, console=console, transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total))


def print_json(result: Any) -> None:
    """Write a result to stdout as ``to_json`` has it."""
    sys.stdout.write(to_json(result))


def write_json(path: Path, result: Any) -> None:
    """Write a result to ``path`` in one step; raises ``OutputError`` where the disk refuses."""
    write_atomically(path, to_json(result).encode())


def to_json(result: Any) -> str:
    """Indented JSON with a newline at its end: dataclasses by their fields, arrays as lists, NaN as ``null``.

    Raises
    ------
    ValueError
        For infinity, which JSON has no form for.
    """
    return json.dumps(_plain(result), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
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
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
