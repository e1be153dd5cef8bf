"""The page of operators has a row for each, and every test and check that it names is there."""

import ast
import re
from pathlib import Path

from tests.moe.operators import constraints
from worker_agent.moe.operators import reference

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/research/operators.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| operator ")
]


def named(cell):
    return re.findall(r"`([\w.]+)`", cell)


def asserting():
    """All tests of the layer that assert something or expect an error."""
    found = set()
    for path in (ROOT / "tests/moe").rglob("test_*.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            source = ast.unparse(function)
            if "assert" in source or "raises" in source or "run_declared" in source:
                found.add(function.name)
    return found


def test_every_operator_has_one_row_and_is_checked_there():
    rows = [(name, held) for operators, _, _, held in ROWS for name in named(operators)]
    assert sorted(name for name, _ in rows) == sorted(reference.__all__)
    for name, held in rows:
        assert constraints.CHECKS[name].__name__ in named(held), name


def test_every_test_of_a_row_exists_and_asserts():
    names = {name for _, _, _, held in ROWS for name in named(held)} - {"constraints.py"}
    checks = {check.__name__ for check in constraints.CHECKS.values()}
    assert {name for name in names - checks if name not in asserting()} == set()
    assert len(names - checks) > 8
