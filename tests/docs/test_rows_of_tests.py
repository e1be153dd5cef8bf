"""Every row of the fault and operator pages names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.moe.operators import constraints

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/research/faults.md").read_text()
SOURCES = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))


def rows() -> list[tuple[str, str]]:
    """Return the first and last cells of each fault's row. ``the same`` stands for the cell above."""
    faults: list[tuple[str, str]] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] != "fault" and set(cells[0]) != {"-"}:
            last = cells[3]
            if last.startswith("the same"):
                last = faults[-1][1] + last.removeprefix("the same")
            faults.append((cells[0], last))
    assert len(faults) > 40
    return faults


ROWS = rows()


@pytest.mark.parametrize(("fault", "shown"), ROWS, ids=[fault for fault, _ in ROWS])
def test_the_tests_named_in_a_faults_row_exist(fault: str, shown: str) -> None:
    files = re.findall(r"`([a-z_/]+(?:\.py|/))`", shown)
    names = re.findall(r"`(test_\w+?)_?…?`", shown)
    assert files or names or "`misbehaving`" in shown or "explorer" in shown, f"{shown!r} names no test"
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
    assert [name for name in names if f"def {name}" not in SOURCES] == []


OPERATORS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/research/operators.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| operator ")
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def test_every_operator_has_one_row_that_names_its_check() -> None:
    rows = [(name, held) for operators, _, _, held in OPERATORS for name in named(operators)]
    assert sorted(name for name, _ in rows) == sorted(constraints.CHECKS)
    for name, held in rows:
        assert constraints.CHECKS[name].__name__ in named(held), name


def test_the_tests_named_for_an_operator_exist() -> None:
    names = {name for _, _, _, held in OPERATORS for name in named(held)} - {"constraints.py"}
    names -= {check.__name__ for check in constraints.CHECKS.values()}
    assert {name for name in names if f"def {name}(" not in SOURCES} == set()
    assert len(names) > 8
