"""A solver that hangs, or a disk that takes nothing, is noticed, and harms no other deployment."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import grpc
import pytest

from eplb_service.control.core.health import problems
from eplb_service.control.server.deciding import decider
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.wire.generated import operator_pb2
from tests.control.fake_group import FakeGroup, skewed_heat
from tests.control.server.test_service import settings, until


async def test_a_solver_that_hangs_blocks_no_other_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, hangs = decider.decide, threading.Event()
    asked: list[Any] = []

    def hang(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 1:
            hangs.wait(60)
        return solve(*arguments)

    monkeypatch.setattr(decider, "decide", hang)
    async with running_service(settings(solve_timeout_seconds=5)) as service:
        await service.warm
        async with FakeGroup(service.address) as stuck, FakeGroup(service.address) as other:
            await stuck.join(deployment="stuck")
            await other.join(deployment="other")
            await stuck.send_heat(skewed_heat(8))
            await other.send_heat(skewed_heat(8))
            await until(
                lambda: all(one.heat and one.heat.steps for one in service.plane.deployments.values())
            )
            with pytest.raises(grpc.aio.AioRpcError, match="given up after 5 s"):
                await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            answer = await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="other"))
            assert answer.plan_id
            with pytest.raises(grpc.aio.AioRpcError, match="is still being computed"):
                await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            hangs.set()
            await until(lambda: service.plane.decider.may_decide("stuck"))
            answer = await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            assert answer.plan_id


async def test_a_disk_that_takes_nothing_is_a_problem_until_it_does_again(
    service: RunningService, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.known)
    store = service.plane._writer.store
    save = store.save_deployment

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "save_deployment", full)
    service.plane.set_paused(deployment, True)
    await until(lambda: any("disk is full" in problem for problem in problems(deployment)))
    monkeypatch.setattr(store, "save_deployment", save)
    await until(lambda: problems(deployment) == [])
    sample = service.plane._metrics.registry.get_sample_value("eplb_store_failures_total")
    assert sample is not None
    assert sample >= 1
