"""A table of text, drawn on a terminal by rich or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.box
import rich.table


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first column is left-aligned, and ``marked`` rows are set off."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    marked: frozenset[int] = frozenset()

    def drawn(self) -> rich.table.Table:
        """For a terminal."""
        table = rich.table.Table(
            title=self.title, caption=self.note or None, box=rich.box.SIMPLE_HEAD, title_justify="left"
        )
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold red" if number in self.marked else None)
        return table

    def markdown(self) -> str:
        """As GitHub writes tables, under a heading."""
        aligned = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [self.columns, aligned, *self.rows]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        body = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        note = f"\n{self.note}\n" if self.note else ""
        return f"## {self.title}\n{note}\n{body}\n"
