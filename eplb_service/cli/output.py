"""Output of commands: tables that fit 80 columns, JSON, and progress on stderr."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from eplb_core.atomic_write import write_atomically
from eplb_core.placement import Float64, mean_par

Row = TypeVar("Row")


def output_console() -> Console:
    """Stdout as it is now: wrapped to the width of a terminal, in whole lines into a file; text is no markup."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)


def table_of(
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], object]],
    texts: Collection[str] = (),
    title: str | None = None,
) -> Table:
    """A table without side borders.

    Parameters
    ----------
    rows
        One for each line.
    columns
        By its heading what makes a column's cell of a row; a column of nothing but ``None`` is left out.
    texts
        Headings of the columns that wrap, beside the first; all others are numbers that are always whole.
    title
        Above it.
    """
    rows = list(rows)
    cells = {heading: [cell(row) for row in rows] for heading, cell in columns.items()}
    shown = {heading: column for heading, column in cells.items() if any(cell is not None for cell in column)}
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, heading in enumerate(shown):
        is_text = number == 0 or heading in texts
        table.add_column(
            heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for line in zip(*shown.values(), strict=True):
        table.add_row(*("-" if cell is None else str(cell) for cell in line))
    return table


def figure(value: float | None, form: str = ".3f") -> str | None:
    """A number for people: ``None`` where it does not apply, a dash where there was nothing to measure."""
    if value is None:
        return None
    return "-" if math.isnan(value) else format(value, form)


def layers_table(columns: Mapping[str, tuple[Float64, str]], worst_L: Float64, most: int = 5) -> Table:
    """The mean over layers, then the layers that are worst: by heading, each layer's figure and the form of one."""

    def cell(values_L: Float64, form: str, layer: int | None) -> str | None:
        return figure(float(mean_par(values_L) if layer is None else values_L[layer]), form)

    cells: dict[str, Callable[[int | None], object]] = {
        "layer": lambda layer: f"all {len(worst_L)}" if layer is None else layer
    }
    for heading, (values_L, form) in columns.items():
        cells[heading] = functools.partial(cell, values_L, form)
    return table_of([None, *np.argsort(-worst_L, kind="stable")[:most].tolist()], cells)


@contextmanager
def progress_bar(
    description: str, total: float | None, *columns: ProgressColumn
) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, which each call updates as rich's ``Progress.update`` does; without a terminal nothing."""
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as bar:
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
