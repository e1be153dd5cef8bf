"""Makes the notebook of the docs from its script: ``python -m tools.notebook`` runs every cell.

The script is plain Python with cells as editors know them (``# %%``); what cells printed and drew is kept in the
notebook, which a test holds to the script and runs again. Cells are dictionaries as in a notebook's file, format 4.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "decision.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")
_MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def cells(script: str) -> list[dict[str, Any]]:
    """The cells of a script, in order."""
    found: list[dict[str, Any]] = []
    parts = _MARK.split(script)[1:]
    for number, (mark, source) in enumerate(zip(parts[::2], parts[1::2], strict=True), 1):
        text = re.sub(r"^# ?", "", source.strip(), flags=re.MULTILINE) if mark else source.strip()
        code = {} if mark else {"execution_count": number, "outputs": []}
        kind = "markdown" if mark else "code"
        found.append({"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **code})
    return found


def executed(script: str) -> list[dict[str, Any]]:
    """The cells with what their code prints and draws, run one after another from the repository's root."""
    names: dict[str, Any] = {}
    found = cells(script)
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        for cell in found:
            if cell["cell_type"] == "code":
                cell["outputs"] = _outputs(cell, names)
    finally:
        os.chdir(before)
    return found


def _outputs(cell: dict[str, Any], names: dict[str, Any]) -> list[dict[str, Any]]:
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), str(SCRIPT), "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), str(SCRIPT), "eval"), names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if lines := printed.getvalue().splitlines(keepends=True):
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if hasattr(shown, "_repr_svg_"):
        data = {"image/svg+xml": shown._repr_svg_().splitlines(keepends=True)}
        count = cell["execution_count"]
        outputs.append(
            {"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}
        )
    return outputs


def main() -> None:
    """Write the notebook again."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": executed(SCRIPT.read_text(encoding="utf-8")),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    NOTEBOOK.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
