"""Makes the notebook of the docs from its script: ``python -m tools.notebook`` runs every cell.

The script is plain Python with cells as editors know them (``# %%``); what cells printed and drew is kept in the
notebook, which a test holds to the script and runs again.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "decision.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
_MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A part of the script: text, or code and what it printed and drew."""

    source: str
    is_text: bool
    printed: str = ""
    picture: str = ""


def cells(script: str) -> list[Cell]:
    """The cells of a script, in order."""
    parts = _MARK.split(script)[1:]
    return [
        Cell(re.sub(r"^# ?", "", source.strip(), flags=re.MULTILINE) if mark else source.strip(), bool(mark))
        for mark, source in zip(parts[::2], parts[1::2], strict=True)
    ]


def executed(unread: Sequence[Cell]) -> list[Cell]:
    """The cells with what their code prints and draws, run one after another from the repository's root."""
    names: dict[str, Any] = {}
    return [cell if cell.is_text else _run(cell, names) for cell in unread]


def _run(cell: Cell, names: dict[str, Any]) -> Cell:
    body = ast.parse(cell.source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed), _at(ROOT):
        exec(compile(ast.Module(body, []), str(SCRIPT), "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), str(SCRIPT), "eval"), names)  # noqa: S307
    picture = shown._repr_svg_() if hasattr(shown, "_repr_svg_") else ""
    return Cell(cell.source, False, printed.getvalue(), picture)


@contextlib.contextmanager
def _at(folder: Path) -> Iterator[None]:
    """Within it, ``folder`` is the working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def notebook(run: Sequence[Cell]) -> dict[str, Any]:
    """The document of a notebook, format 4."""
    return {
        "cells": [_text(cell) if cell.is_text else _code(cell, number) for number, cell in enumerate(run, 1)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def read(document: dict[str, Any]) -> list[Cell]:
    """The cells of such a document."""
    found = []
    for cell in document["cells"]:
        outputs = cell.get("outputs", [])
        printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
        pictures = [output["data"]["image/svg+xml"] for output in outputs if "data" in output]
        is_text = cell["cell_type"] == "markdown"
        found.append(Cell("".join(cell["source"]), is_text, printed, "".join("".join(p) for p in pictures)))
    return found


def _text(cell: Cell) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": cell.source.splitlines(keepends=True)}


def _code(cell: Cell, number: int) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = []
    if cell.printed:
        lines = cell.printed.splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if cell.picture:
        data = {"image/svg+xml": cell.picture.splitlines(keepends=True)}
        outputs.append(
            {"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}}
        )
    return {
        "cell_type": "code",
        "execution_count": number,
        "metadata": {},
        "outputs": outputs,
        "source": cell.source.splitlines(keepends=True),
    }


def main() -> None:
    """Write the notebook again."""
    run = executed(cells(SCRIPT.read_text(encoding="utf-8")))
    NOTEBOOK.write_text(json.dumps(notebook(run), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
