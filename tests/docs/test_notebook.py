"""The notebook of the docs is its script, runs from top to bottom, and shows what it shows today."""

import json
import re

import pytest

from tools import notebook
from tools.docs_reference.site_pages import generated_pages

KEPT = notebook.read(json.loads(notebook.NOTEBOOK.read_text()))
NUMBER = re.compile(r"\d+\.\d+")


@pytest.fixture(scope="module")
def run():
    return notebook.executed(notebook.cells(notebook.SCRIPT.read_text()))


def test_the_notebook_is_that_of_the_script():
    of_script = [(cell.source, cell.is_text) for cell in notebook.cells(notebook.SCRIPT.read_text())]
    assert [(cell.source, cell.is_text) for cell in KEPT] == of_script, "run `python -m tools.notebook`"


def test_every_cell_runs_and_says_what_the_notebook_says(run):
    for now, kept in zip(run, KEPT, strict=True):
        assert NUMBER.sub("#", now.printed) == NUMBER.sub("#", kept.printed), "run `python -m tools.notebook`"
        numbers = [[float(word) for word in NUMBER.findall(cell.printed)] for cell in (now, kept)]
        # Another processor may round otherwise, and a search then end elsewhere.
        assert numbers[0] == pytest.approx(numbers[1], abs=0.1)
        assert bool(now.picture) == bool(kept.picture)
    assert sum(bool(cell.picture) for cell in run) == 2


def test_the_decision_is_made_and_written(run):
    printed = "".join(cell.printed for cell in run)
    assert re.search(r"flashlb with \d slots per rank", printed)
    before, after = map(
        float, re.findall(r"PAR of the last .* (\d\.\d+) in order, (\d\.\d+) as placed", printed)[0]
    )
    assert after < before


def test_the_site_has_its_page():
    page = generated_pages()["notebook.md"]
    assert page.startswith("# From a trace to a decision, in Python")
    assert page.count("```python") == sum(not cell.is_text for cell in KEPT)
    assert page.count("data:image/svg+xml") == 2


def test_what_was_made_is_read_back():
    cells = [notebook.Cell("# A\n\ntext", True), notebook.Cell("print(1)\n2", False, "1\n", "<svg>\n</svg>")]
    assert notebook.read(notebook.notebook(cells)) == cells
