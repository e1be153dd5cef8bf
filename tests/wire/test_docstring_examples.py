"""Tests of the examples in the docstrings of the wire package, placements and readable numbers."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = (
    *("figures", "planner.verdicts"),
    *("placement.foreign", "placement.par", "placement.placement", "placement.tables"),
    *("wire.agent", "wire.channel", "wire.codec", "wire.fields", "wire.operator", "wire.plan"),
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_pass(name: str) -> None:
    results = doctest.testmod(import_module(f"eplb_core.{name}"))
    assert results.failed == 0
    assert results.attempted > 0
