"""Tables that fit a terminal of 80 columns: numbers are never cut, text wraps."""

from __future__ import annotations

from rich import box
from rich.table import Table


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
