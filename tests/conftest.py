"""Settings for all tests: deterministic examples, no example deadlines on a busy machine, and a limit on cleanup.

A property test runs on 50 examples unless it sets a different number. ``make test-slow`` doubles that number.
Counterexamples that random exploration finds (``make fuzz-properties``) are kept beside their test as an explicit
``@example``.

Each test has a time limit (``timeout``). If its cleanup hangs after that limit, or if it hangs outside Python, its
process exits with the stacks of all threads. The run then reports the test and continues.
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
    """Duplicate standard error before pytest captures the output of tests."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the time that a test and its cleanup may take."""
    marker = item.get_closest_marker("timeout")
    everywhere = item.config.getoption("timeout") or item.config.getini("timeout")
    seconds = float(marker.args[0] if marker else everywhere)
    faulthandler.dump_traceback_later(seconds + _CLEANUP_SECONDS, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
