"""A decision looks back as far as heat is as it is now, and prices what was measured; the first may use other heat."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.moving import NOTHING_MEASURED
from eplb_core.heat.assembler import RememberedHeat
from eplb_core.heat.sources import StepTimes
from eplb_core.placement import Int32, mean_par, par
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Outlook, Promise
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.wire.codec import unpack
from eplb_service.control.core.decisions import Decisions
from eplb_service.control.server.deciding.computing import DecisionInputs, PriorError, Priors, decide
from eplb_service.control.server.deciding.decider import _on_thread
from eplb_service.control.server.service import running_service
from eplb_service.control.server.settings import SettingsError
from tests.control.fake_group import (
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    FakeGroup,
    first_placement,
    heat_report,
    live_of,
    skewed_heat,
)
from tests.control.server.service_under_test import settings, tick, until
from tests.planner.drawn import rank_loads


def heat(steps: int, seed: int) -> Int32:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.ones(EXPERTS), LAYERS)
    drawn = [generator.multinomial(4096, row_E, size=steps) for row_E in popularity_LE]
    return np.stack(drawn, axis=1).astype(np.int32)


def asked(heat_TLE: Int32, decisions: Decisions | None = None) -> DecisionInputs:
    return DecisionInputs(
        RememberedHeat(tuple(heat_TLE), (LAYERS, EXPERTS)),
        live_of(first_placement()),
        None,
        Topology.flat(RANKS),
        PlannerSettings(threads=1),
        decisions or Decisions(),
        NOTHING_MEASURED,
    )


def paced(steps: int, interval: int) -> Decisions:
    """Before the first decision, after so many steps."""
    return Decisions(pace=Pace(steps, memory=512, longest=interval, seen=steps, due_at=steps))


def test_where_no_pace_is_known_all_heat_is_looked_at() -> None:
    inputs = asked(heat(200, 0))
    assert (inputs.looked_at.steps, inputs.serving_steps) == (200, None)


def test_still_heat_is_looked_at_beyond_an_interval() -> None:
    inputs = asked(heat(200, 0), paced(200, 64))
    assert 128 <= inputs.looked_at.steps <= 200
    assert inputs.serving_steps == 24.0


def test_heat_from_before_a_change_is_left_out() -> None:
    changed_TLE = np.concatenate([heat(136, 0), heat(64, 1)])
    assert asked(changed_TLE, paced(200, 64)).looked_at.steps <= 64


def test_cpu_is_paid_for_by_steps_as_long_as_they_are_measured_to_be() -> None:
    inputs = replace(asked(heat(8, 0)), cpu_share=0.1)
    assert inputs.steps_paying(0.4) == pytest.approx(100)
    times = StepTimes(np.full(8, 10_000.0), np.full(8, np.nan))
    assert replace(inputs, times=times).steps_paying(0.4) == pytest.approx(400)
    assert decide(inputs)[1].cost > 0


def test_what_comes_of_a_forecast_is_held_against_it() -> None:
    inputs = asked(heat(200, 0), paced(200, 64))
    first = replace(inputs, found=inputs.live.serving)
    made, outlook, _ = decide(first)
    forecasts = outlook.forecasts
    assert (made.moves > 0, forecasts.held) == (True, None)
    pace = replace(first.decisions.pace, seen=264)
    later = replace(first, decisions=replace(first.decisions, pace=pace, forecasts=forecasts))
    # The plan was not carried out, so that nothing was won.
    after = decide(later)[1].forecasts
    assert (after.misses, after.held) == ((forecasts.gain.mean,), False)


def departed(before: int) -> Decisions:
    """After so many steps, and four more whose ratio left what was promised."""
    promise = Promise(np.full(LAYERS + 1, 1.2), np.full(LAYERS + 1, 1e-4), np.ones(LAYERS + 1), before)
    decisions = Decisions(pace=Pace(first=before, memory=512, longest=512)).after_steps(
        np.full((before, LAYERS), 1.2)
    )
    decisions = decisions.deciding(before).decided(
        Outlook(promise), live_of(first_placement()), changed=False
    )
    decisions = decisions.after_steps(np.full((4, LAYERS), 1.8))
    assert decisions.pace is not None
    assert decisions.pace.settling
    return decisions


def test_where_ratios_left_what_was_promised_heat_says_whether_that_is_a_change() -> None:
    changed = asked(np.concatenate([heat(100, 0), heat(4, 1)]), departed(100))
    assert (changed.looked_at.steps, changed.serving_steps) == (4, 100.0)
    assert not decide(changed)[1].burst
    burst = asked(heat(104, 0), departed(100))
    assert (burst.looked_at.steps, burst.serving_steps) == (104, 24.0)
    assert decide(burst)[1].burst


STEPS = 128
CURVE = CostCurve(5.0, 400.0, 100.0, 3.0)


def varied_heat() -> Int32:
    """Batches and skew that differ from step to step; every count divides by the ranks, and some experts have none."""
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.4), (STEPS, LAYERS))
    batch_T = np.exp(rng.uniform(np.log(64), np.log(2048), STEPS))
    heat_TLE = RANKS * rng.poisson(batch_T[:, None, None] * popularity / RANKS)
    return heat_TLE.astype(np.int32)


class TimedGroup(FakeGroup):
    """Ranks whose steps take what the curve says of the tokens in their slots."""

    async def serve(self, heat_TLE: Int32) -> None:
        shape = (len(heat_TLE), LAYERS, SLOTS)
        reports = [heat_report(self.live, rank.rank, self.step, heat_TLE) for rank in self.ranks]
        us_TLR = np.stack(
            [
                CURVE.slot_us(unpack(report.slot_counts, shape, "slot_counts")).sum(axis=2)
                for report in reports
            ],
            axis=2,
        )
        us_T = 3000 + us_TLR.max(axis=2).sum(axis=1)
        for rank, report in zip(self.ranks, reports, strict=True):
            report.step_micros[:] = us_T.astype(int).tolist()
            await rank.say(heat_report=report)
        self.step += len(heat_TLE)


@pytest.mark.parametrize("asked", [True, False])
async def test_steps_that_fit_a_curve_are_planned_for_by_it_where_that_is_asked(asked: bool) -> None:
    chosen = settings(window_steps=STEPS, decision_interval=1 << 20, fitted_curve=asked)
    async with running_service(chosen) as service, TimedGroup(service.address) as group:
        await group.join()
        deployment = service.plane.deployments["decode"]
        heat_TLE = varied_heat()
        for first in range(0, STEPS, 32):
            await group.serve(heat_TLE[first : first + 32])
        await until(lambda: deployment.heat is not None and deployment.heat.assembled == group.step)
        outcome = await service.plane.decider.start(deployment)
        await until(lambda: deployment.decisions.time_price is not None)
        assert deployment.decisions.time_price is not None
        assert deployment.decisions.time_price.kind == "fitted", deployment.decisions.time_price.reason
        assert deployment.decisions.fitted is not None
        assert deployment.decisions.fitted.slope_us == pytest.approx(CURVE.slope_us, rel=0.2)
        if outcome.result == "plan":
            await group.carry_out(await group.hear_plan())
            await until(lambda: deployment.plan is None)
        observed = service.plane.observer.of("decode")
        assert observed.last_decision is not None
        assert all(verdict.us_seen is None for verdict in observed.last_decision.verdicts)
        await service.plane.decider.start(deployment)
        observed = service.plane.observer.of("decode")
        assert observed.last_decision is not None
        assert all((verdict.us_seen is not None) == asked for verdict in observed.last_decision.verdicts)


def ratio(group: FakeGroup) -> float:
    """Of heat like the prior's, as the group serves now."""
    live = group.live
    return float(mean_par(par(rank_loads(skewed_heat(16, seed=5), live.placement, live.log2phy_RLE))))


async def test_decoding_begins_by_the_heat_of_prefill_and_goes_on_by_its_own() -> None:
    async with (
        running_service(settings(prior="decode=prefill", decision_interval=64)) as service,
        FakeGroup(service.address) as prefill,
        FakeGroup(service.address) as decode,
    ):
        await decode.join()
        await until(lambda: service.plane.deployments["decode"].live is not None)
        tick(service.plane)
        assert service.plane.deployments["decode"].may_begin, "prefill has no heat yet"
        await prefill.join(deployment="prefill")
        await prefill.send_heat(skewed_heat(16))
        before = ratio(decode)
        await decode.carry_out(await decode.hear_plan())
        assert ratio(decode) < before - 0.5
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        assert deployment.last_decision.endswith("by the heat of prefill")
        assert not deployment.may_begin
        await decode.send_heat(skewed_heat(64, seed=1))
        await until(lambda: deployment.decisions.time_price is not None)
        assert deployment.last_decision.startswith("every layer kept")


async def test_a_trace_is_a_prior_too_but_not_for_ranks_that_have_switched_before(tmp_path: Path) -> None:
    trace = tmp_path / "prefill.npz"
    np.savez(trace, heat=skewed_heat(40))
    async with running_service(settings(prior=f"decode={trace}")) as service:
        async with FakeGroup(service.address) as first:
            await first.join()
            before = ratio(first)
            await first.carry_out(await first.hear_plan())
            assert ratio(first) < before - 0.5
            served = first.live
        async with FakeGroup(service.address, live_of(served.placement, served.epoch)) as later:
            await later.join(group_id="second")
            deployment = service.plane.deployments["decode"]
            await until(lambda: deployment.live is not None and deployment.live.epoch == served.epoch)
            assert not deployment.may_begin


async def test_heat_of_another_model_is_a_problem_and_no_plan(tmp_path: Path) -> None:
    trace = tmp_path / "other.npz"
    np.savez(trace, heat=np.ones((4, LAYERS + 1, EXPERTS), dtype=np.int32))
    async with (
        running_service(settings(prior=f"decode={trace}")) as service,
        FakeGroup(service.address) as decode,
    ):
        await decode.join()
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.decisions.begun)
        (problem,) = deployment.plan_problems
        assert "choose a source with the same model" in problem
        assert deployment.plan is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill", "write DEPLOYMENT=SOURCE"),
        ("decode=", "write DEPLOYMENT=SOURCE"),
        ("decode=decode", "other than itself"),
        ("decode=a,decode=b", "one per deployment"),
        ("de code=a", "the deployment is"),
    ],
)
def test_text_that_names_no_prior_is_refused(text: str, why: str) -> None:
    with pytest.raises(PriorError, match=why):
        Priors(text, 16)


async def test_a_trace_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    trace = tmp_path / "notes.npz"
    trace.write_text("no trace")
    with pytest.raises(SettingsError, match=r"setting prior: .*notes"):
        async with running_service(settings(prior=f"decode={trace}")):
            pass
    np.savez(trace, heat=np.zeros((4, LAYERS, EXPERTS), dtype=np.int32))
    with pytest.raises(SettingsError, match="has a token"):
        async with running_service(settings(prior=f"decode={trace}")):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a priority of its own")
def test_a_decision_gives_way_to_other_work_on_its_cores():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert _on_thread(os.getpriority, os.PRIO_PROCESS, 0).result() == max(own, 5)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
