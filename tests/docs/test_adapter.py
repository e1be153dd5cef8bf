"""The documented adapter is balanced by a real service, and its outputs stay correct."""

import asyncio
import importlib.util
from pathlib import Path

from eplb_service.control.server.service import run_service
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_host.py"


def serve(address, steps, after_switch):
    spec = importlib.util.spec_from_file_location("toy_host", EXAMPLE)
    toy_host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy_host)
    return toy_host.serve(address, steps, after_switch)


async def test_the_toy_host_is_balanced_and_its_outputs_do_not_change():
    async with run_service(settings()) as service:
        results = await asyncio.to_thread(run_ranks, 2, serve, service.address, 6000, 200)
    assert max(worst for worst, _ in results) < 1e-4
    assert {switched for _, switched in results} != {0}
