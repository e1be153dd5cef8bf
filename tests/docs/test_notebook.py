"""The notebook of the docs is its script, runs from top to bottom, and shows what it shows today."""

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


def test_the_notebook_is_that_of_the_script():
    kept = [{**cell, "outputs": []} if "outputs" in cell else cell for cell in KEPT]
    assert kept == notebook.cells(SCRIPT), "run `python -m tools.notebook`"


def test_every_cell_runs_and_says_what_the_notebook_says():
    run = notebook.executed(SCRIPT)
    for now, kept in zip(map(printed, run), map(printed, KEPT), strict=True):
        assert NUMBER.sub("#", now) == NUMBER.sub("#", kept), "run `python -m tools.notebook`"
        # Another processor may round otherwise, and a search then end elsewhere.
        numbers = [[float(word) for word in NUMBER.findall(text)] for text in (now, kept)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.1)
    assert drawn(run) == drawn(KEPT)
    assert sum(drawn(run)) == 2
    found = re.search(
        r"PAR of the last .* (\d\.\d+) in order, (\d\.\d+) as placed", "".join(map(printed, run))
    )
    assert float(found[2]) < float(found[1])
