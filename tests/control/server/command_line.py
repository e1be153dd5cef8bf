"""Run the `eplb` command against a fake group's service."""

from __future__ import annotations

import asyncio

from eplb_service.cli.main import run
from tests.control.fake_group import (
    FakeGroup,
)


async def eplb(group: FakeGroup, *arguments: str) -> int:
    return await asyncio.to_thread(run, [*arguments, "--address", group.address])
