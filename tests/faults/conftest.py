"""Tests marked ``faults`` take minutes: they run where ``-m faults`` asks for them, with ``make faults``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "faults" in config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("faults") is not None]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
