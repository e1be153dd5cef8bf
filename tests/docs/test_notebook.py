"""Tests of the docs' notebook: it matches its script, runs from top to bottom, and shows current output."""

import json
import re

import pytest

from tools import notebook

KEPT = json.loads(notebook.NOTEBOOK.read_text())["cells"]
SCRIPT = notebook.SCRIPT.read_text()
NUMBER = re.compile(r"\d+\.\d+")


def printed(cell):
    return "".join("".join(output.get("text", ())) for output in cell.get("outputs", ()))


def drawn(cells):
    return ["data" in output for cell in cells for output in cell.get("outputs", ())]


def test_the_notebook_matches_its_script():
    kept = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in KEPT]
    assert kept == notebook.cells(SCRIPT), "run `python -m tools.notebook`"


def test_every_cell_prints_the_output_shown_in_the_notebook():
    run = notebook.executed(SCRIPT)
    for now, kept in zip(map(printed, run), map(printed, KEPT), strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", kept), "run `python -m tools.notebook`"
        # Rounding differs between processors, so a search can end with a different placement.
        numbers = [[float(word) for word in NUMBER.findall(text)] for text in (now, kept)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.1)
    assert drawn(run) == drawn(KEPT)
    assert sum(drawn(run)) == 2
    match = re.search(
        r"PAR of the last .* (\d\.\d+) in order, (\d\.\d+) as placed", "".join(map(printed, run))
    )
    assert float(match[2]) < float(match[1])
