"""Services of these tests run in this process: kernels are compiled first, and logs kept apart from output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from eplb_service.solver.warmup import warm_up
from eplb_service.telemetry.logs import configure_logs


@pytest.fixture(scope="session", autouse=True)
def warm_kernels() -> None:
    """A first compilation takes longer than any test may wait for a plan."""
    warm_up(1)


@pytest.fixture(autouse=True)
def logs_on_stderr() -> Iterator[None]:
    configure_logs("json", "info")
    yield
    structlog.reset_defaults()
