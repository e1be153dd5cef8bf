"""A replay of a service's recorded heat, with the CPU costs that it charged, makes the same decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from eplb_core.placement import Int32
from eplb_core.planner.counterfactual import TimePrice
from eplb_core.planner.decision import DecisionInputs
from eplb_core.planner.plan import Outlook, Plan
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.server.deciding import decider
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.io.trace import ArrayTrace, TraceFacts
from eplb_service.replay import loop
from eplb_service.replay.costs import Costs
from eplb_service.replay.policy import Job, Setup
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, SLOTS, FakeGroup, skewed_heat
from tests.control.server.service_under_test import settings, until

WINDOW = 64
FIRST = 32
Decide = Callable[[DecisionInputs], tuple[Plan, Outlook]]


@dataclass
class Recording:
    """Decisions of a service and their costs.

    Parameters
    ----------
    decisions
        For each decision: the number of steps served before it, and its plan.
    costs
        Cost of each decision and of each estimate of the time price, in steps, in order.
    prices
        Estimates of the time price, in order.
    inputs
        Inputs of each decision.
    """

    decisions: list[tuple[int, Plan]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    prices: list[TimePrice] = field(default_factory=list)
    inputs: list[DecisionInputs] = field(default_factory=list)

    def recorded(self, decide: Decide) -> Decide:
        """Return ``decide``, recording every call."""

        def recorder(inputs: DecisionInputs) -> tuple[Plan, Outlook]:
            plan, outlook = decide(inputs)
            self.inputs.append(inputs)
            self.decisions.append((inputs.session.decided_at, plan))
            return plan, outlook

        return recorder

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        """Record the decisions, and their costs, of services in this process."""
        record_decision = Deployment.record_decision
        record_time_price = Deployment.record_time_price

        def decision_recorder(
            deployment: Deployment, outlook: Outlook, cost: float, *, changed: bool
        ) -> None:
            self.costs.append(cost)
            record_decision(deployment, outlook, cost, changed=changed)

        def price_recorder(deployment: Deployment, price: TimePrice, cost: float) -> None:
            self.costs.append(cost)
            self.prices.append(price)
            record_time_price(deployment, price, cost)

        patch.setattr(decider, "decide", self.recorded(decider.decide))
        patch.setattr(Deployment, "record_decision", decision_recorder)
        patch.setattr(Deployment, "record_time_price", price_recorder)


def workloads() -> Int32:
    """Return heat of three workloads, with a different hot expert in each layer, and short bursts in the third."""
    heat_TLE = np.concatenate([skewed_heat(70), skewed_heat(60, seed=1)[:, :, ::-1], skewed_heat(90, seed=2)])
    heat_TLE[170:173, :, 0] += 400
    return np.ascontiguousarray(heat_TLE)


async def served(service: RunningService, group: FakeGroup, heat_TLE: Int32) -> None:
    """Serve the heat step by step, and carry out every plan before the next step."""
    deployment = service.plane.deployments["decode"]
    planner = service.plane.decider
    for step in range(len(heat_TLE)):
        await group.send_heat(heat_TLE[step : step + 1])
        await until(lambda: deployment.heat is not None and deployment.heat.assembled == group.step)
        while not all(task.done() for task in [*planner._running.values(), *planner._appraising.values()]):
            if deployment.plan is not None:
                await group.carry_out(await group.hear_plan())
                await until(lambda: deployment.plan is None)
            await asyncio.sleep(0.001)
        if deployment.plan is not None:
            await group.carry_out(await group.hear_plan())
            await until(lambda: deployment.plan is None)


def replayed(heat_TLE: Int32, recording: Recording, patch: pytest.MonkeyPatch, cpu: bool) -> Recording:
    """Replay the heat, starting from the recording's first layout; charge the recorded costs if ``cpu`` is true."""
    first = recording.inputs[0]
    job = Job("flashlb", Setup(SLOTS, WINDOW, FIRST), "flashlb", first.settings)
    scene = loop.Scene(
        first.topology, Costs(bytes_per_expert=BYTES_PER_EXPERT), first.layout.placement.phy2log_LRS
    )
    again = Recording()
    costs: Iterator[float] = iter(recording.costs)
    prices = iter(recording.prices)
    patch.setattr(loop, "decide", again.recorded(loop.decide))
    patch.setattr(loop, "price_time", lambda inputs: next(prices, None))
    patch.setattr(loop._Run, "_steps_paying", lambda run, began: next(costs, 0.0) if cpu else 0.0)
    # Every fake rank reports this heat as its own.
    source_TRLE = np.repeat(heat_TLE[:, None], RANKS, axis=1)
    trace = ArrayTrace(RANKS * heat_TLE, TraceFacts(ranks=RANKS), source_TRLE=source_TRLE)
    for _ in loop.run(job, trace, scene):
        pass
    return again


def changes_of(plan: Plan) -> list[Any]:
    return [(change.layer, change.phy2log_RS.tolist(), change.log2phy_RE.tolist()) for change in plan.layers]


async def test_a_replay_makes_the_same_plans_at_the_same_steps_as_the_service() -> None:
    heat_TLE = workloads()
    recording = Recording()
    with pytest.MonkeyPatch.context() as patch:
        recording.listen(patch)
        # With this CPU share, the budget for a decision accrues over about 30 steps.
        service_settings = settings(
            window_steps=WINDOW, decision_interval=FIRST, report_steps=1, cpu_share=0.02, move_price=0.05
        )
        async with run_service(service_settings) as service, FakeGroup(service.address) as group:
            await service.warm
            await group.join()
            await until(lambda: service.plane.deployments["decode"].live is not None)
            await served(service, group, heat_TLE)
    with pytest.MonkeyPatch.context() as patch:
        again = replayed(heat_TLE, recording, patch, cpu=True)
    # A replay makes no decision after its last step, because no step is left to score it on.
    scored = [(step, plan) for step, plan in recording.decisions if step < len(heat_TLE)]
    assert [step for step, _ in again.decisions] == [step for step, _ in scored]
    for (_, plan), (_, plan_again) in zip(scored, again.decisions, strict=True):
        assert changes_of(plan_again) == changes_of(plan)
    assert sum(bool(plan.layers) for _, plan in recording.decisions) >= 2, (
        "the workloads must lead to at least two plans"
    )
    with pytest.MonkeyPatch.context() as patch:
        unlimited = replayed(heat_TLE, recording, patch, cpu=False)
    assert len(unlimited.decisions) > len(scored), "without CPU costs, there must be more decisions"
