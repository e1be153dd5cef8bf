"""Services of these tests run in this process: their logs must not mix with what commands print."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from eplb_service.telemetry.logs import configure_logs


@pytest.fixture(autouse=True)
def logs_on_stderr() -> Iterator[None]:
    configure_logs("json", "info")
    yield
    structlog.reset_defaults()
