"""Settings and waiting helpers for tests that run a service in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from eplb_service.control.server.plane.control_plane import ControlPlane
from eplb_service.control.server.settings import ServiceSettings


def settings(**changes: Any) -> ServiceSettings:
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "metrics": "127.0.0.1:0",
        "store": ":memory:",
        "window_steps": 32,
        "decision_interval": 32,
        "report_steps": 8,
        "threads": 1,
    }
    return ServiceSettings(**{**values, **changes})


def tick(plane: ControlPlane) -> None:
    """Run the service's periodic work, which normally runs every second."""
    for _ in plane.ticking():
        pass


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    async def poll() -> None:
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), seconds)
