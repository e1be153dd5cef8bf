"""How all tests run: the same examples every time, and no deadlines, since a busy machine is no defect of the code.

Properties are tried on 50 examples unless a test says otherwise, and on twice as many as in the gate by
``make test-slow``. What random exploration finds (``make fuzz-properties``) is kept beside its test as an explicit
``@example``.

A test has so many seconds (``timeout``). One whose cleanup hangs after that, or that hangs outside Python, ends its
process with the stacks of all threads, so that the run names it and goes on.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

_CLEANUP_SECONDS = 120.0

settings.register_profile("gate", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "explore", max_examples=50, deadline=None, derandomize=False, database=None, print_blob=True
)
settings.load_profile("gate")

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep standard error as it is before tests' output is captured."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Bound a test with all its cleanup."""
    marker = item.get_closest_marker("timeout")
    everywhere = item.config.getoption("timeout") or item.config.getini("timeout")
    seconds = float(marker.args[0] if marker else everywhere)
    faulthandler.dump_traceback_later(seconds + _CLEANUP_SECONDS, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
