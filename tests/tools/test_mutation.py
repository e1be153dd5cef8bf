"""Every mutant is a module with exactly one small defect, and a room's score counts those that its tests notice."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutation.sites import mutants

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a < b", [("comparison", "(a <= b)")]),
        ("é + b", [("arithmetic", "(é - b)")]),
        ("a and not b", [("boolean", "(a or not b)"), ("boolean", "(b)")]),
        ("if a:\n    pass", [("condition", "(not a)")]),
        ("x = True", [("constant", "(False)")]),
        ("x = 3", [("constant", "(4)")]),
        ("def f():\n    return a", [("return", "return None")]),
        ("def f():\n    return None", []),
        ("def f(a: 'list[3]' = b) -> 3: ...", []),
        ("raise ValueError(3)", []),
        ("'a docstring'", []),
        ("if TYPE_CHECKING:\n    x = 3", []),
    ],
)
def test_a_mutant_has_one_defect(source: str, changes: list[tuple[str, str]]) -> None:
    found = mutants(source)
    assert [(mutant.kind, mutant.after) for mutant in found] == changes
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source == source.replace(mutant.before, mutant.after, 1)


@pytest.mark.slow
def test_a_defect_that_no_test_notices_survives(tmp_path: Path) -> None:
    for folder in ("eplb_service/planner", "tests/planner"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "eplb_service/__init__.py").touch()
    (tmp_path / "eplb_service/planner/seen.py").write_text("def seen(a):\n    return a + 1\n")
    (tmp_path / "eplb_service/planner/unseen.py").write_text("LIMIT = 5\n")
    (tmp_path / "tests/planner/test_seen.py").write_text(
        "from eplb_service.planner.seen import seen\n\ndef test_seen():\n    assert seen(1) == 2\n"
    )
    command = [sys.executable, "-m", "tools.mutation", "--room", "planner", "--root", str(tmp_path)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "planner: 3 of 4 mutants killed" in done.stdout
    survived = [
        found for found in json.loads((tmp_path / "out.json").read_text()) if found["outcome"] == "survived"
    ]
    assert [(found["path"], found["after"]) for found in survived] == [
        ("eplb_service/planner/unseen.py", "(6)")
    ]
