"""Every row of docs/research/faults.md names a test, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/research/faults.md").read_text()
SOURCES = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))


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
    files = re.findall(r"`([a-z_/]+(?:\.py|/))`", shown)
    names = re.findall(r"`(test_\w+?)_?…?`", shown)
    assert files or names or "`misbehaving`" in shown or "explorer" in shown, f"{shown!r} names no test"
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []
    assert [name for name in names if f"def {name}" not in SOURCES] == []
