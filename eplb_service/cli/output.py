"""Command output: tables that fit in 80 columns, JSON, and hints and progress on stderr."""

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
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from eplb_core.atomic_write import write_atomically
from eplb_core.placement import Float64, mean_par

Row = TypeVar("Row")


def output_console() -> Console:
    """Return a console on stdout that prints text literally, without markup.

    Lines are wrapped on a terminal, but not in a file or a pipe.
    """
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)


def hint(text: str) -> None:
    """Warn the user on stderr about options that are valid but probably unintended."""
    typer.echo(f"eplb: hint: {text}", err=True)


def table_of(
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], object]],
    texts: Collection[str] = (),
    title: str | None = None,
) -> Table:
    """Return a table without side borders.

    Parameters
    ----------
    rows
        Objects to show, one per line.
    columns
        Functions that return a row's cell, keyed by heading. Columns with only ``None`` are omitted.
    texts
        Headings of columns whose cells wrap, in addition to the first column. All other columns contain numbers, which
        never wrap.
    title
        Title above the table.
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


def figure(value: float | None, spec: str = ".3f") -> str | None:
    """Format a number for a table: ``None`` if it does not apply, or a dash if nothing was measured (NaN)."""
    if value is None:
        return None
    return "-" if math.isnan(value) else format(value, spec)


def layers_table(columns: Mapping[str, tuple[Float64, str]], worst_L: Float64, limit: int = 5) -> Table:
    """Return a table with the mean over all layers, followed by the worst layers.

    Parameters
    ----------
    columns
        Values, float64 ``[L]``, and their format specification, keyed by heading.
    worst_L
        float64 ``[L]``, values by which layers are ranked; the highest value is the worst.
    limit
        Maximum number of worst layers to show.
    """

    def cell(values_L: Float64, spec: str, layer: int | None) -> str | None:
        return figure(float(mean_par(values_L) if layer is None else values_L[layer]), spec)

    cells: dict[str, Callable[[int | None], object]] = {
        "layer": lambda layer: f"all {len(worst_L)}" if layer is None else layer
    }
    for heading, (values_L, spec) in columns.items():
        cells[heading] = functools.partial(cell, values_L, spec)
    return table_of([None, *np.argsort(-worst_L, kind="stable")[:limit].tolist()], cells)


@contextmanager
def progress_bar(
    description: str, total: float | None, *columns: ProgressColumn
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, or nothing if stderr is not a terminal.

    Yields a function that updates the bar. It accepts the arguments of rich's ``Progress.update``.
    """
    console = Console(stderr=True)
    all_columns = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=total))


def print_json(result: Any) -> None:
    """Write a result to stdout as JSON; see ``to_json``."""
    sys.stdout.write(to_json(result))


def write_json(path: Path, result: Any) -> None:
    """Write a result to a JSON file atomically. Raises ``OutputError`` if the file cannot be written."""
    write_atomically(path, to_json(result).encode())


def to_json(result: Any) -> str:
    """Return a result as indented JSON with a final newline.

    Dataclasses become objects, arrays become lists, and NaN becomes ``null``.

    Raises
    ------
    ValueError
        If a number is infinite, which JSON cannot represent.

    Examples
    --------
    >>> print(to_json({"par_L": np.array([1.25, np.nan])}), end="")
    {
      "par_L": [
        1.25,
        null
      ]
    }
    """
    return json.dumps(_json_value(result), indent=2, allow_nan=False) + "\n"


def _json_value(value: Any) -> Any:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    if isinstance(value, float) and math.isnan(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
