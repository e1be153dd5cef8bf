"""Tests that the service resumes planning when a deployment continues with a different number of ranks."""

from __future__ import annotations

import asyncio

from eplb_service.control.server.service import run_service
from tests.control.server.conftest import logs_on_stderr, warm_kernels  # noqa: F401
from tests.control.server.service_under_test import settings
from tests.e2e import regrouped_host
from tests.ranks import run_ranks

SIZES = (3, 2, 3)


async def test_layers_are_balanced_without_changing_outputs_when_the_group_shrinks_or_grows():
    async with run_service(settings()) as service:
        facts = await asyncio.to_thread(run_ranks, 3, regrouped_host.serve, service.address, SIZES)
        deployment = service.plane.deployments["regrouped"]
        assert deployment.group.shape.ranks == SIZES[-1]
    for rank, facts_of_rank in enumerate(facts):
        assert [fact["ranks"] for fact in facts_of_rank] == [size for size in SIZES if rank < size]
        for fact in facts_of_rank:
            assert fact["halted"] is None
            assert fact["switched"] >= 1
            assert fact["worst"] < 1e-4
