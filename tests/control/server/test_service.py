"""A real server with fake ranks: heat leads to a plan, the plan to a new epoch, and the operator API reports both."""

from __future__ import annotations

import asyncio
import gc
import re
import sqlite3
import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from eplb_core.placement import Int32
from eplb_core.wire.agent import CallOff
from eplb_core.wire.generated import agent_pb2, operator_pb2
from eplb_service.control.core.health import problems
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.control.server.deciding import decider
from eplb_service.control.server.listening import ListenError
from eplb_service.control.server.service import RunningService, run_service
from tests.control.fake_group import (
    BYTES_PER_EXPERT,
    LAYERS,
    RANKS,
    FakeGroup,
    FakeRank,
    first_placement,
    hello_of,
    live_of,
    skewed_heat,
)
from tests.control.server.service_under_test import settings, tick, until
from worker_agent.policy.service import ServiceDecision
from worker_agent.settings import AgentSettings


async def test_connected_streams_are_excluded_from_garbage_collection(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand ranks, one collection blocked the event loop for 0.1 s."""
    monkeypatch.setattr("eplb_service.control.server.service._MANY_RANKS", RANKS)
    before = gc.get_freeze_count()
    async with FakeGroup(service.address) as group:
        await group.join()
        await until(lambda: gc.get_freeze_count() > before)
    gc.unfreeze()


async def test_heat_leads_to_a_plan_and_the_plan_to_a_new_epoch(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        welcomes = await group.join()
        assert {welcome.leader_term for welcome in welcomes} == {service.plane.leader_term}
        assert {welcome.report_steps for welcome in welcomes} == {8}
        await group.fill_window()
        plans = await group.hear_plan()
        await group.carry_out(plans)
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)

        answer = await group.operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))
        status = answer.status
        assert (status.epoch, status.digest) == (group.live.epoch, group.live.digest)
        assert status.layers_switched == len(plans[0].layers) == group.live.epoch > 0
        moves = sum(len(layer.moves_M5) for layer in plans[0].layers)
        assert (status.experts_moved, status.bytes_moved) == (moves, moves * BYTES_PER_EXPERT)
        assert (status.agents_connected, status.steps_received, status.steps_lost) == (RANKS, 32, 0)
        assert list(status.problems) == []

        # The loads after the plan are better balanced than the loads for which the plan was made.
        await group.send_heat(skewed_heat(64, seed=1))
        await until(lambda: deployment.totals.steps_received == 96)
        answer = await group.operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))
        assert len(answer.layers) == LAYERS
        assert 1.0 <= answer.status.par < 1.5


@pytest.mark.parametrize("earlier", [0, 1], ids=["first decision", "later decision"])
async def test_a_rank_that_stops_sending_heat_does_not_block_a_decision(
    service: RunningService, group: FakeGroup, earlier: int
) -> None:
    deployment = service.plane.deployments["decode"]
    for _ in range(earlier):
        await group.fill_window()
        await group.carry_out(await group.hear_plan())
        await until(lambda: deployment.ended_plan is not None)
    tick(service.plane)
    before = deployment.session.decided_at
    await group.send_heat(skewed_heat(8))
    all_ranks = group.ranks
    group.ranks = all_ranks[:-1]
    for _ in range(4):
        await group.send_heat(skewed_heat(8))
    await until(lambda: deployment.heat is not None and deployment.heat.pending.behind(0)[1] == 32)
    tick(service.plane)
    assert deployment.session.decided_at == before
    # Pretend that 60 s have passed.
    deployment.late = replace(deployment.late, since={RANKS - 1: time.monotonic() - 60})
    tick(service.plane)
    await until(lambda: deployment.session.decided_at == before + 8)
    group.ranks = all_ranks


async def test_experts_bound_to_their_ranks_are_measured_but_not_moved(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join(rank_bound=True)
        await group.fill_window()
        deployment = service.plane.deployments["decode"]
        await until(lambda: bool(deployment.last_decision))
        status = (await group.operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))).status
        assert status.last_decision.startswith("every layer kept (PAR ")
        assert "experts are bound to their ranks" in status.last_decision
        assert [problem.split(" (")[0] for problem in status.problems] == ["experts are bound to their ranks"]
        assert (status.plan_id, status.epoch) == (0, 0)
        assert status.par > 1.5


async def test_an_observed_deployment_is_measured_but_never_planned_for(service: RunningService) -> None:
    async with FakeGroup(service.address) as group:
        await group.join(rank_bound=True, observed=True)
        await group.fill_window()
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.heat is not None and deployment.heat.steps == 32)
        tick(service.plane)
        # Pretend that no decision has been made for an hour.
        deployment.decision_stall = replace(deployment.decision_stall, seconds=3600.0, steps=10**6)
        status = (await group.operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))).status
        assert (status.observed, status.last_decision, list(status.problems)) == (True, "", [])
        assert (status.plan_id, status.epoch) == (0, 0)
        assert status.par > 1.5
        # In policy mode, the engine asks for decisions under the same name.
        agent = AgentSettings(service=service.address, deployment="decode", decision_timeout_seconds=20)
        heat_NLE = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
        decide = ServiceDecision(agent, "even")
        new_LP = await asyncio.to_thread(decide, heat_NLE, np.array([[0, 1, 2, 3, 0, 1]]), 2, 1, True)
        assert new_LP.tolist() == [[0, 1, 2, 3, 0, 2]]
        with pytest.raises(grpc.aio.AioRpcError, match="do not accept plans"):
            await group.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="decode"))


async def test_a_rejected_plan_changes_nothing_and_is_reported(
    service: RunningService, group: FakeGroup
) -> None:
    await group.fill_window()
    plan = (await group.hear_plan())[0]
    await group.say_all(plan.plan_id, plan.layers[0].layer, agent_pb2.PLAN_STATE_REFUSED, "not now")
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None)
    assert not service.plane.streams._plans, "the plan is not sent to any further rank"
    answer = await group.operator.GetStatus(operator_pb2.GetStatusRequest(deployment="decode"))
    assert answer.status.epoch == 0
    assert list(answer.status.problems) == [f"plan {plan.plan_id} refused: ranks 0, 1, 2, 3: not now"]


def shifted_heat(steps: int) -> Int32:
    """Return heat after a change: different experts are hot, and there are twice as many tokens."""
    heat_TLE = skewed_heat(steps, seed=7)
    return np.ascontiguousarray(heat_TLE[:, :, ::-1] * 2)


async def answer_call(group: FakeGroup, plan_id: int) -> None:
    """Read the call-off on every rank, then report the plan as called off from all ranks."""
    for rank in group.ranks:
        assert (await rank.hear(calls=True)).call_off.plan_id == plan_id
    await group.say_all(plan_id, 0, agent_pb2.PLAN_STATE_CALLED_OFF, "called off by the service")


async def test_a_change_in_heat_calls_off_a_plan_and_the_next_plan_keeps_committed_layers(
    service: RunningService, group: FakeGroup
) -> None:
    await group.fill_window()
    plans = await group.hear_plan()
    first = plans[0]
    deployment = service.plane.deployments["decode"]
    layer = first.layers[0]
    tables_RE = np.stack([plan.layers[0].log2phy_E for plan in plans])
    # Unchanged heat must not cause the plan to be called off while a layer is being committed.
    await group.send_heat(skewed_heat(16, seed=2))
    group.live = group.live.with_layer(layer.layer, layer.phy2log_RS, tables_RE)
    await group.say_all(first.plan_id, layer.layer, agent_pb2.PLAN_STATE_COMMITTED)
    await group.send_heat(skewed_heat(8, seed=3))
    await until(lambda: deployment.totals.steps_received == 56)
    assert deployment.plan is not None
    assert not deployment.plan.called_off
    for _ in range(4):
        await group.send_heat(shifted_heat(4))
    await answer_call(group, first.plan_id)
    # ``hear_plan`` checks that the new plan starts from the committed layer.
    second = (await group.hear_plan())[0]
    assert deployment.ended_plan is not None
    assert (deployment.ended_plan.plan_id, deployment.ended_plan.committed) == (first.plan_id, 1)
    assert deployment.ended_plan.outcome is Outcome.CALLED_OFF
    assert second.plan_id != first.plan_id
    answer = await group.operator.GetHistory(operator_pb2.GetHistoryRequest(deployment="decode"))
    assert [(plan.outcome, plan.committed) for plan in answer.plans] == [("", 0), ("called_off", 1)]
    assert answer.plans[1].reason == "heat changed while the plan was under way"


async def test_a_rank_that_reconnects_receives_the_call_off(
    service: RunningService, group: FakeGroup
) -> None:
    await group.fill_window()
    plan = (await group.hear_plan())[0]
    deployment = service.plane.deployments["decode"]
    group.ranks[2].call.cancel()
    await until(lambda: len(deployment.connected) == RANKS - 1)
    deployment.call_off("test", time.monotonic())
    service.plane.streams.call_off("decode", CallOff(plan.plan_id))
    group.ranks[2] = FakeRank(group.channel, 2)
    await group.ranks[2].greet(hello_of(group.live, 2))
    await answer_call(group, plan.plan_id)
    await until(lambda: deployment.ended_plan is not None)
    assert deployment.ended_plan is not None
    assert deployment.ended_plan.outcome is Outcome.CALLED_OFF


async def test_a_stopping_service_ends_streams_with_a_status_that_asks_to_reconnect() -> None:
    async with run_service(settings()) as running:
        group = FakeGroup(running.address)
        await group.join()
    code, text = await group.ranks[0].refusal()
    await group.channel.close()
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "reconnect" in text


async def test_the_service_is_not_ready_until_the_solver_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(
        "eplb_service.control.server.deciding.decider.warm_up", lambda _threads: compiled.wait(20)
    )
    async with run_service(settings()) as running, FakeGroup(running.address) as group:
        health = health_pb2_grpc.HealthStub(group.channel)
        request = health_pb2.HealthCheckRequest()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Agents can register before the solver is warm. Any decision that is due is made once the solver is warm.
        await group.join()
        await group.fill_window()
        deployment = running.plane.deployments["decode"]
        await until(lambda: deployment.totals.steps_received == 32)
        compiled.set()
        await running.warm
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await group.hear_plan())[0].layers


async def test_reflection_lists_the_services(service: RunningService) -> None:
    async with grpc.aio.insecure_channel(service.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {listed.name for listed in answer.list_services_response.service}
            break
    assert {"eplb.v1.AgentService", "eplb.v1.OperatorService", "grpc.health.v1.Health"} <= names


async def test_ranks_at_an_unknown_epoch_are_asked_for_a_new_hello(
    service: RunningService, group: FakeGroup
) -> None:
    group.live = live_of(first_placement(), epoch=9)
    await group.heartbeat()
    for rank in group.ranks:
        code, text = await rank.refusal()
        assert code == grpc.StatusCode.ABORTED
        assert "the ranks are at epoch 9, but the service expected epoch 0; send another Hello" in text
    await until(lambda: not service.plane.deployments["decode"].connected)
    await group.join()
    live = service.plane.deployments["decode"].live
    assert live is not None
    assert live.epoch == 9


@pytest.mark.parametrize("flag", ["listen", "metrics", "page", "health"])
async def test_a_start_fails_if_an_address_is_in_use(service: RunningService, flag: str) -> None:
    reason = (
        f"{service.address}: another program is listening there, most likely another `eplb serve` on this host; stop "
        f"it, or choose another address with --{flag}"
    )
    with pytest.raises(ListenError, match=re.escape(reason)):
        async with run_service(settings(**{flag: service.address})):
            pass


@pytest.mark.parametrize("flag", ["listen", "metrics"])
async def test_an_address_of_another_host_is_not_reported_as_in_use(flag: str) -> None:
    with pytest.raises(ListenError, match=rf"192\.0\.2\.1:9.*choose another address with --{flag}") as raised:
        async with run_service(settings(**{flag: "192.0.2.1:9", "insecure": True})):
            pass
    assert "another program" not in str(raised.value)


async def test_rank_0_receives_the_balance_of_new_steps(service: RunningService, group: FakeGroup) -> None:
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.live is not None)
    tick(service.plane)
    outboxes = [service.plane.streams._streams["decode"][rank].outbox for rank in range(RANKS)]
    assert all(outbox.empty() for outbox in outboxes), "there is no heat yet"
    await group.send_heat(skewed_heat(8))
    await until(lambda: deployment.assembled == 8)
    tick(service.plane)
    messages = [await asyncio.wait_for(group.ranks[0].call.read(), 60)]
    assert [message.WhichOneof("message") for message in messages] == ["balance"]
    balance = messages[0].balance
    assert balance.steps == 8
    assert balance.par == pytest.approx(deployment.heat.served_par(8).mean(), rel=1e-6)  # type: ignore[union-attr]
    assert balance.par > 1.5
    assert all(outbox.empty() for outbox in outboxes[1:])


async def test_a_solver_that_hangs_does_not_block_other_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = decider.decide
    hangs = threading.Event()
    calls: list[Any] = []

    def hang(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            hangs.wait(60)
        return solve(*arguments)

    monkeypatch.setattr(decider, "decide", hang)
    async with run_service(settings(solve_timeout_seconds=5)) as service:
        await service.warm
        async with FakeGroup(service.address) as stuck, FakeGroup(service.address) as healthy:
            await stuck.join(deployment="stuck")
            await healthy.join(deployment="other")
            await stuck.send_heat(skewed_heat(8))
            await healthy.send_heat(skewed_heat(8))
            await until(
                lambda: all(
                    deployment.heat and deployment.heat.steps
                    for deployment in service.plane.deployments.values()
                )
            )
            with pytest.raises(grpc.aio.AioRpcError, match="timed out after 5 s"):
                await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            answer = await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="other"))
            assert answer.plan_id
            with pytest.raises(grpc.aio.AioRpcError, match="is still being computed"):
                await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            hangs.set()
            await until(lambda: service.plane.decider.may_decide("stuck"))
            answer = await stuck.operator.Rebalance(operator_pb2.RebalanceRequest(deployment="stuck"))
            assert answer.plan_id


async def test_a_full_disk_is_a_problem_until_it_recovers_and_does_not_stop_balancing(
    service: RunningService, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.known)
    store = service.plane._writer.store
    sample = service.plane._metrics.registry.get_sample_value

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_write", full)
        await group.fill_window()
        await group.carry_out(await group.hear_plan())
        await until(lambda: deployment.ended_plan is not None)
        await until(lambda: any("disk is full" in problem for problem in problems(deployment)))
        await until(lambda: sample("eplb_store_failing") == 1)
    await until(lambda: problems(deployment) == [] and sample("eplb_store_failing") == 0)
    assert (sample("eplb_store_failures_total") or 0) >= 1
    assert store.deployments() == list(service.plane.remembered.values())
