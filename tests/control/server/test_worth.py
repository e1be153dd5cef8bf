"""All outputs express the gain from balancing as time only if the gain was measured across commits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from eplb_core.placement import Int32, mean_par
from eplb_core.planner.verdicts import Worth
from eplb_core.wire.codec import unpack
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.server.service import RunningService, run_service
from tests.control.fake_group import EXPERTS, LAYERS, SLOTS, STEP_MICROS, FakeGroup, heat_report, skewed_heat
from tests.control.server.command_line import eplb
from tests.control.server.conftest import settings
from tests.control.server.service_under_test import tick, until

Times = Callable[[np.ndarray], np.ndarray]
"""Step times in microseconds, ``[T]``, as a function of the tokens on each layer's most loaded rank."""


class TimedGroup(FakeGroup):
    """A group whose step times are a function of the load on its most loaded ranks."""

    times: Times

    async def serve(self, heat_TLE: Int32) -> None:
        shape = (len(heat_TLE), LAYERS, SLOTS)
        reports = [heat_report(self.live, rank.rank, self.step, heat_TLE) for rank in self.ranks]
        counts = [unpack(report.slot_counts, shape, "slot_counts").sum(axis=2) for report in reports]
        us_T = self.times(np.max(counts, axis=0).sum(axis=1))
        for rank, report in zip(self.ranks, reports, strict=True):
            report.step_micros[:] = us_T.astype(int).tolist()
            await rank.say(heat_report=report)
        self.step += len(heat_TLE)


def heat_with_hot_expert(steps: int, expert: int, seed: int) -> Int32:
    """Return heat with one hot expert, in which every count is a multiple of the number of ranks."""
    heat_TLE = 4 * np.random.default_rng(seed).poisson(10, (steps, LAYERS, EXPERTS))
    heat_TLE[:, :, expert] += 400
    return heat_TLE.astype(np.int32)


async def follow_plans(service: RunningService, group: FakeGroup) -> None:
    """Carry out every offered plan until no decision is in progress."""
    deployment = service.plane.deployments["decode"]
    while deployment.plan is not None or not all(
        task.done() for task in service.plane.decider._running.values()
    ):
        if deployment.plan is not None:
            await group.carry_out(await group.hear_plan())
            await until(lambda: deployment.plan is None)
        await asyncio.sleep(0.01)


async def switch_often(service: RunningService, group: TimedGroup, rounds: int = 7) -> Worth:
    """Serve heat whose hot expert changes in every round, with steps before and after each round's plan."""
    deployment = service.plane.deployments["decode"]
    for turn in range(rounds):
        expert = 3 * turn % EXPERTS
        await group.serve(heat_with_hot_expert(48, expert, seed=turn))
        await until(lambda: deployment.assembled == group.step)
        for _ in range(2):
            # An alarm may already have started a decision based on fewer of these steps.
            with contextlib.suppress(ConflictError):
                await service.plane.decider.start(deployment)
            await follow_plans(service, group)
        await group.serve(heat_with_hot_expert(48, expert, seed=100 + turn))
        await until(lambda: deployment.assembled == group.step)
    await group.serve(heat_with_hot_expert(64, 3 * (rounds - 1) % EXPERTS, seed=200))
    await until(lambda: deployment.assembled == group.step)
    await follow_plans(service, group)
    assert deployment.heat is not None
    deployment.switch_log.looked_at(deployment.heat.served_steps())
    deployment.session = replace(deployment.session, worth=None)
    service.plane.decider._evaluate_at.clear()

    def is_judged() -> bool:
        tick(service.plane)
        return deployment.session.worth is not None

    await until(is_judged)
    worth = deployment.session.worth
    assert worth is not None
    return worth


@pytest_asyncio.fixture
async def service_and_group(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[RunningService, TimedGroup]]:
    # Heat changes in every round, so a plan could be called off before the ranks receive it. The ranks would then
    # wait forever.
    monkeypatch.setattr(Deployment, "may_call_off", False)
    often_settings = settings(window_steps=128, decision_interval=1 << 20, cpu_share=1.0)
    async with run_service(often_settings) as service, TimedGroup(service.address) as group:
        await group.join()
        yield service, group


def page_documents(service: RunningService) -> str:
    """Return all documents about the deployment that the page fetches."""
    documents = []
    for path in ("", "/decode", "/decode/figures", "/decode/balance"):
        with urllib.request.urlopen(f"{service.page_url}api/v1/deployments{path}") as answer:
            documents.append(answer.read().decode())
    return "\n".join(documents)


async def all_surfaces(service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]) -> str:
    """Return as text the output of ``status``, ``top`` and ``deployments``, the metrics, and the page's documents."""
    for command in (("status", "decode"), ("status", "decode", "--json"), ("status", "decode", "--explain")):
        assert await eplb(group, *command) == 0
    assert await eplb(group, "top", "decode", "--once") == 0
    assert await eplb(group, "deployments") == 0
    tick(service.plane)
    metrics = service.plane._metrics.exposition("")[1].decode()
    series = "\n".join(line for line in metrics.splitlines() if not line.startswith("#"))
    shown = capsys.readouterr().out
    return "\n".join([shown, series, await asyncio.to_thread(page_documents, service)])


@pytest.mark.parametrize("kind", ["constant", "noisy", "falling"])
async def test_no_output_shows_a_gain_if_step_times_are_independent_of_balance(
    kind: str, service_and_group: tuple[RunningService, TimedGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    service, group = service_and_group
    rng = np.random.default_rng(3)
    us_by_kind: dict[str, Times] = {
        "constant": lambda slowest_T: np.full(len(slowest_T), 20_000.0),
        "noisy": lambda slowest_T: rng.lognormal(np.log(20_000), 0.15, len(slowest_T)),
        "falling": lambda slowest_T: 40_000 - 25.0 * (group.step + np.arange(len(slowest_T))),
    }
    group.times = us_by_kind[kind]
    worth = await switch_often(service, group)
    assert worth.switches >= 4
    assert worth.verdict in ("not measurable", "no gain"), worth.reason
    shown = await all_surfaces(service, group, capsys)
    assert "helps" not in shown
    assert "eplb_gain_seconds{" not in shown
    assert "eplb_gain_tokens_per_second{" not in shown
    assert "eplb_deployment_par_left_alone{" in shown
    status = json.loads(shown[shown.index("{") : shown.index("\n}") + 2])["status"]
    assert status["worth"]["gain_ms"] is None
    assert status["worth"]["ranks_worth"] is None


async def test_a_measured_gain_is_shown_if_step_times_follow_balance(
    service_and_group: tuple[RunningService, TimedGroup], capsys: pytest.CaptureFixture[str]
) -> None:
    service, group = service_and_group
    rng = np.random.default_rng(4)
    group.times = lambda slowest_T: 5000 + 8.0 * slowest_T * rng.lognormal(0, 0.01, len(slowest_T))
    worth = await switch_often(service, group)
    assert worth.verdict == "helps", worth.reason
    assert worth.gain_ms is not None
    assert worth.gain_low_ms is not None
    assert worth.gain_high_ms is not None
    assert 0 < worth.gain_low_ms < worth.gain_ms < worth.gain_high_ms
    shown = await all_surfaces(service, group, capsys)
    assert "helps: +" in shown
    assert "of 4 ranks" in " ".join(shown.replace("│", " ").split())
    assert "eplb_gain_seconds{" in shown


async def carry_out_one_plan(service: RunningService, group: FakeGroup) -> Worth:
    """Carry out one plan, serve more steps, and return the judged gain."""
    await group.send_heat(skewed_heat(32))
    await group.carry_out(await group.hear_plan())
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None)
    await group.send_heat(skewed_heat(64, seed=1))
    await until(lambda: deployment.assembled == 96)
    service.plane.decider._evaluate_at.clear()

    def balanced() -> bool:
        tick(service.plane)
        worth = deployment.session.worth
        return worth is not None and worth.par < worth.par_left_alone - 0.1

    await until(balanced)
    worth = deployment.session.worth
    assert worth is not None
    return worth


async def test_no_gain_and_no_milliseconds_are_shown_after_a_single_plan(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    worth = await carry_out_one_plan(service, group)
    assert (worth.verdict, worth.gain_ms, worth.steps) == ("not measured", None, 32)
    assert worth.step_ms == pytest.approx(STEP_MICROS / 1e3)
    shown = await all_surfaces(service, group, capsys)
    assert "helps" not in shown
    text = " ".join(shown.replace("│", " ").split())
    assert "ms per step" not in text
    assert f"initial layout {worth.par_left_alone:.3f}" in text
    assert f"PAR -{worth.par_gain_percent:.3g} %" in text
    assert "ms_per_move" not in text or '"ms_per_move": null' in text
    assert 'eplb_gain_verdict_info{deployment="decode",verdict="not measured"} 1' in shown


async def test_the_current_par_covers_the_reported_number_of_steps(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    await carry_out_one_plan(service, group)
    assert await eplb(group, "status", "decode", "--json") == 0
    status = json.loads(capsys.readouterr().out)["status"]
    heat = service.plane.deployments["decode"].heat
    assert heat is not None
    assert status["par_steps"] == 32
    served_L = mean_par(heat.served_par(32), axis=0)
    assert status["par"] == pytest.approx(float(served_L.mean()))
    assert status["worth"]["par"] == pytest.approx(status["par"])
    assert status["hottest_layer_par"] == pytest.approx(float(served_L.max()))
    assert status["redundant_slots"] == 4


async def test_figures_of_departed_ranks_are_not_shown_as_current(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    await carry_out_one_plan(service, group)
    await group.leave()
    await until(lambda: not service.plane.deployments["decode"].connected)
    shown = await all_surfaces(service, group, capsys)
    status = json.loads(shown[shown.index("{") : shown.index("\n}") + 2])
    facts = status["status"]
    assert (facts["par"], facts["par_steps"], facts["worth"], facts["forecast"]) == (0, 0, None, None)
    assert (facts["hottest_rank"], facts["idle_seconds"], facts["move_price"]) == (None, None, None)
    assert all(layer["par"] == layer["planned_par"] == 0 for layer in status["layers"])
    assert "initial layout" not in shown.partition("PAR over")[0]
    assert "eplb_deployment_par" not in shown
    assert '"rank_loads": null' in shown or '"rank_loads":null' in shown


async def test_a_failed_evaluation_does_not_affect_the_plan(
    service: RunningService, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no figures today")

    for name in ("evaluate_gain", "price_time"):
        monkeypatch.setattr(f"eplb_service.control.server.deciding.decider.{name}", broken)
    await group.send_heat(skewed_heat(32))
    await group.carry_out(await group.hear_plan())
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None)
    tick(service.plane)
    decider = service.plane.decider
    await until(
        lambda: all(task.done() for task in [*decider._evaluating.values(), *decider._appraising.values()])
    )
    assert deployment.session.worth is None
    assert deployment.last_decision.startswith("plan 1")
