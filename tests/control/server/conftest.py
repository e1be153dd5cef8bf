"""Fixtures for services that run in the test process. Kernels are compiled first, and logs go to stderr."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from eplb_core.solver.warmup import warm_up
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.telemetry.logs import configure_logs
from tests.control.fake_group import FakeGroup
from tests.control.server.service_under_test import settings


@pytest.fixture(scope="session", autouse=True)
def warm_kernels() -> None:
    """Compile the kernels, because the first compilation takes longer than tests wait for a plan."""
    warm_up(1)


@pytest.fixture(autouse=True)
def logs_on_stderr() -> Iterator[None]:
    before = structlog.get_config()
    configure_logs()
    yield
    structlog.configure(**before)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[RunningService]:
    async with run_service(settings()) as running:
        yield running


@pytest_asyncio.fixture
async def group(service: RunningService) -> AsyncIterator[FakeGroup]:
    """Yield a group whose ranks are all registered."""
    async with FakeGroup(service.address) as fake_group:
        await fake_group.join()
        yield fake_group


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a path for a store that does not exist yet."""
    return str(tmp_path / "state.sqlite3")
