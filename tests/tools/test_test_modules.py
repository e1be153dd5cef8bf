"""Test modules are not imported: code that several tests share is in a named module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(
    r"\bfrom tests[\w.]*\.test_\w+ import|\bfrom tests[\w.]* import test_|\bimport [^\n]*\btests[\w.]*\.test_"
)


def test_no_module_imports_from_a_test_module() -> None:
    paths = [path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in paths if path != Path(__file__) and IMPORT.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("line", "imports_a_test"),
    [
        ("from tests.control.server.test_service import settings", True),
        ("from tests.adapters import test_vllm_hooks as hooks", True),
        ("import os, tests.io.test_recording as recording", True),
        ("import tests.io.test_recording", True),
        ("from tests.control.server.service_under_test import settings", False),
    ],
)
def test_imports_of_test_modules_are_recognised(line: str, imports_a_test: bool) -> None:
    assert bool(IMPORT.search(line)) is imports_a_test
