"""Every mutant is a module with exactly one small defect, and a room's score counts those that its tests notice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
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


def tree(root: Path, modules: dict[str, str], test: str) -> list[str]:
    """Write a planner with these modules and one test module; returns the command that judges it."""
    for folder in ("eplb_service/planner", "tests/planner"):
        (root / folder).mkdir(parents=True)
    (root / "eplb_service/__init__.py").touch()
    for name, text in modules.items():
        (root / "eplb_service/planner" / name).write_text(text)
    (root / "tests/planner/test_seen.py").write_text(test)
    return [sys.executable, "-m", "tools.mutation", "--room", "planner", "--root", str(root)]


@pytest.mark.slow
def test_a_defect_that_no_test_notices_survives(tmp_path: Path) -> None:
    command = tree(
        tmp_path,
        {"seen.py": "def seen(a):\n    return a + 1\n", "unseen.py": "LIMIT = 5\n"},
        "from eplb_service.planner.seen import seen\n\ndef test_seen():\n    assert seen(1) == 2\n",
    )
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


@pytest.mark.slow
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    begun, copies = tmp_path / "begun", tmp_path / "copies"
    copies.mkdir()
    test = (
        "import os, pathlib, time\n\ndef test_waits():\n"
        f"    pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n    time.sleep(300)\n"
    )
    command = tree(tmp_path / "root", {"seen.py": "LIMIT = 5\n"}, test)
    running = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(copies)})
    try:
        while not (begun.exists() and begun.read_text()):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        assert running.wait(60) == 1
    finally:
        running.kill()
    assert list(copies.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
