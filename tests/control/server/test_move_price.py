"""Moves are priced by what ranks measure of them as soon as that is enough, and operators see which it is."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from eplb_service.cli.main import run
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.wire.generated import agent_pb2
from tests.control.fake_group import SLOTS, FakeGroup, heat_report, skewed_heat
from tests.control.server.test_service import settings, until

REPORT_STEPS, TRANSFER_STEPS = 8, 4
CALM_US, MOVING_US = 20_000, 25_000
SECONDS = 0.08
"""Of a layer's transfer."""


class MeasuringGroup(FakeGroup):
    """Ranks whose steps take a quarter longer while weights travel, and who report how long that was."""

    async def serve(self, hot: int, us: int = CALM_US, steps: int = REPORT_STEPS) -> None:
        """Steps in which one expert per layer is hot."""
        heat_TLE = skewed_heat(steps, seed=self.step)
        heat_TLE = np.roll(heat_TLE, hot, axis=2)
        for rank in self.ranks:
            report = heat_report(self.live, rank.rank, self.step, heat_TLE)
            report.step_micros[:] = [us] * steps
            await rank.say(heat_report=report)
        self.step += steps

    async def switch(self, hot: int) -> None:
        """Carry out the plan that comes, with heat between its milestones."""
        plans = await self.hear_plan()
        first = plans[0]
        await self.say_all(first.plan_id, first.layers[0].layer, agent_pb2.PLAN_STATE_ACCEPTED)
        for index, layer in enumerate(first.layers):
            await self.serve(hot, MOVING_US, TRANSFER_STEPS)
            await self.say_all(
                first.plan_id, layer.layer, agent_pb2.PLAN_STATE_TRANSFERRED, transfer_seconds=SECONDS
            )
            tables_RE = np.stack([plan.layers[index].log2phy_E for plan in plans])
            self.live = self.live.with_layer(layer.layer, layer.phy2log_RS, tables_RE)
            await self.say_all(
                first.plan_id, layer.layer, agent_pb2.PLAN_STATE_COMMITTED, commit_seconds=0.004
            )


async def plans_carried_out(service: RunningService, group: MeasuringGroup, plans: int) -> None:
    """Each for another hot expert."""
    deployment = service.plane.deployments["decode"]

    def all_heard() -> bool:
        return deployment.heat is not None and deployment.heat.assembled == group.step

    for hot in range(plans):
        for _ in range(4):
            await group.serve(hot)
        await until(all_heard)
        outcome = await service.plane.decider.start(deployment)
        assert outcome.result == "plan", outcome.message
        await group.switch(hot)
        await until(lambda: deployment.plan is None)


async def test_status_shows_a_measured_price(capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = settings(window_steps=48, decision_interval=1 << 20)
    async with running_service(by_hand) as service, MeasuringGroup(service.address) as group:
        await group.join()
        await plans_carried_out(service, group, 6)
        deployment = service.plane.deployments["decode"]
        costs = deployment.switch_log.costs()
        price = deployment.decisions.move_price
        arguments = ["status", "decode", "--address", service.address]
        assert await asyncio.to_thread(run, [*arguments, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["status"]["move_price"]
        assert await asyncio.to_thread(run, arguments) == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        reported = service.plane._metrics.registry.get_sample_value
        assert reported("eplb_move_price_info", {"deployment": "decode", "price": "measured"}) == 1
        assert reported("eplb_switch_cost_seconds", {"deployment": "decode"}) == pytest.approx(0.004)
    assert price is not None
    assert costs.commit_seconds == pytest.approx(0.004)
    assert costs.lost_share == pytest.approx(1 - CALM_US / MOVING_US, abs=0.02)
    assert costs.expert_seconds is not None
    assert SECONDS / SLOTS <= costs.expert_seconds <= SECONDS
    assert price.kind == "measured"
    assert shown["kind"] == "measured"
    assert shown["price"] == pytest.approx(price.value)
    assert shown["ms_per_move"] == pytest.approx(price.move_ms)
    assert shown["ms_per_switch"] == pytest.approx(4.0)
    assert "price of moves measured: a ratio must fall by" in text
    assert "ms of steps per expert moved" in text
