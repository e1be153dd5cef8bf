"""Generate the docs' notebook from its script: ``python -m tools.notebook`` runs every cell.

The script is plain Python with cells marked by ``# %%``. The notebook contains the cells' printed output and charts. A
test compares it with the script and runs it again. Cells are dictionaries as in notebook format 4.
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
    r"""Return the cells of a script, in order.

    Examples
    --------
    >>> [(cell["cell_type"], cell["source"]) for cell in cells("# %% [markdown]\n# Title\n# %%\nx = 1\n")]
    [('markdown', ['Title']), ('code', ['x = 1'])]
    """
    notebook_cells: list[dict[str, Any]] = []
    sections = _MARK.split(script)[1:]
    for number, (mark, source) in enumerate(zip(sections[::2], sections[1::2], strict=True), 1):
        text = re.sub(r"^# ?", "", source.strip(), flags=re.MULTILINE) if mark else source.strip()
        code = {} if mark else {"execution_count": number, "outputs": []}
        kind = "markdown" if mark else "code"
        notebook_cells.append(
            {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **code}
        )
    return notebook_cells


def executed(script: str) -> list[dict[str, Any]]:
    """Run a script's cells in the repository root and return them with their outputs."""
    names: dict[str, Any] = {}
    notebook_cells = cells(script)
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        for cell in notebook_cells:
            if cell["cell_type"] == "code":
                cell["outputs"] = _outputs(cell, names)
    finally:
        os.chdir(before)
    return notebook_cells


def _outputs(cell: dict[str, Any], names: dict[str, Any]) -> list[dict[str, Any]]:
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    shown = None
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
    """Run the script and write the notebook."""
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
