"""The page of operators has a row for each, and every test and check that it names is there."""

import re
from pathlib import Path

from tests.moe.operators import constraints

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/research/operators.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| operator ")
]


def named(cell):
    return re.findall(r"`([\w.]+)`", cell)


def test_every_operator_has_one_row_and_is_checked_there():
    rows = [(name, held) for operators, _, _, held in ROWS for name in named(operators)]
    assert sorted(name for name, _ in rows) == sorted(constraints.CHECKS)
    for name, held in rows:
        assert constraints.CHECKS[name].__name__ in named(held), name


def test_every_test_of_a_row_exists():
    names = {name for _, _, _, held in ROWS for name in named(held)} - {"constraints.py"}
    names -= {check.__name__ for check in constraints.CHECKS.values()}
    sources = "".join(path.read_text() for path in (ROOT / "tests/moe").rglob("test_*.py"))
    assert {name for name in names if f"def {name}(" not in sources} == set()
    assert len(names) > 8
