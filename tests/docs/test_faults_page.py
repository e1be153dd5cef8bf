"""Every row of docs/research/faults.md names a test, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/research/faults.md").read_text()
MISBEHAVING = (ROOT / "tests/faults/misbehaving.py").read_text()


def rows() -> list[tuple[str, str]]:
    """First and last cell of each fault; ``the same`` stands for the cell above."""
    found: list[tuple[str, str]] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] != "fault" and set(cells[0]) != {"-"}:
            last = cells[3]
            if last.startswith("the same"):
                last = found[-1][1] + last.removeprefix("the same")
            found.append((cells[0], last))
    return found


ROWS = rows()


def test_there_are_faults() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize(("fault", "shown"), ROWS, ids=[fault for fault, _ in ROWS])
def test_a_fault_is_shown_by_tests_that_exist(fault: str, shown: str) -> None:
    modules = re.findall(r"`([a-z_/]+\.py)`", shown)
    folders = re.findall(r"`([a-z_]+)/`", shown)
    names = re.findall(r"`(test_\w+?)_?(…?)`", shown)
    experiments = re.findall(r"`misbehaving`: ([^;`]+)", shown)
    assert modules or folders or names or experiments or "explorer" in shown, (
        f"{fault}: {shown!r} names no test"
    )
    for module in modules:
        assert (ROOT / "tests" / module).is_file(), module
    for folder in folders:
        assert list((ROOT / "tests" / folder).glob("test_*.py")), folder
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")] if names else []
    for name, more in names:
        pattern = rf"def {name}\w*\(" if more else rf"def {name}\("
        assert any(re.search(pattern, source) for source in sources), name
    for experiment in (one.strip() for listed in experiments for one in listed.split(", ")):
        assert stems(experiment) <= stems(MISBEHAVING), experiment


def stems(text: str) -> set[str]:
    """Terms of a text that say something, without their endings."""
    return {word[:5] for word in re.findall(r"[a-z]{4,}", text.lower())}
