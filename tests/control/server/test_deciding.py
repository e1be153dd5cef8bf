"""A service uses a cost curve fitted to its step times in its decisions, and makes a first plan from prior heat."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.placement import Int32, mean_par, par
from eplb_core.wire.codec import unpack
from eplb_service.control.server.deciding.decider import _on_thread
from eplb_service.control.server.deciding.priors import PriorError, Priors
from eplb_service.control.server.service import run_service
from eplb_service.control.server.settings import SettingsError
from tests.control.fake_group import (
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    FakeGroup,
    heat_report,
    live_of,
    skewed_heat,
)
from tests.control.server.service_under_test import settings, tick, until
from tests.planner.drawn import rank_loads

STEPS = 128
CURVE = CostCurve(5.0, 400.0, 100.0, 3.0)


def varied_heat() -> Int32:
    """Return heat with varying batches and skew. Every count is a multiple of ``RANKS``, and some counts are zero."""
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.4), (STEPS, LAYERS))
    batch_T = np.exp(rng.uniform(np.log(64), np.log(2048), STEPS))
    heat_TLE = RANKS * rng.poisson(batch_T[:, None, None] * popularity / RANKS)
    return heat_TLE.astype(np.int32)


class TimedGroup(FakeGroup):
    """A group whose step times are computed with a cost curve from the tokens in its slots."""

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


@pytest.mark.parametrize("fitted_curve", [True, False])
async def test_a_fitted_cost_curve_is_used_for_planning_only_if_configured(fitted_curve: bool) -> None:
    curve_settings = settings(window_steps=STEPS, decision_interval=1 << 20, fitted_curve=fitted_curve)
    async with run_service(curve_settings) as service, TimedGroup(service.address) as group:
        await group.join()
        deployment = service.plane.deployments["decode"]
        heat_TLE = varied_heat()
        for first in range(0, STEPS, 32):
            await group.serve(heat_TLE[first : first + 32])
        await until(lambda: deployment.heat is not None and deployment.heat.assembled == group.step)
        outcome = await service.plane.decider.start(deployment)
        await until(lambda: deployment.session.time_price is not None)
        assert deployment.session.time_price is not None
        assert deployment.session.time_price.kind == "fitted", deployment.session.time_price.reason
        assert deployment.session.fitted_curve is not None
        assert deployment.session.fitted_curve.slope_us == pytest.approx(CURVE.slope_us, rel=0.2)
        if outcome.result == "plan":
            await group.carry_out(await group.hear_plan())
            await until(lambda: deployment.plan is None)
        observed = service.plane.observer.of("decode")
        assert observed.last_decision is not None
        assert all(verdict.us_seen is None for verdict in observed.last_decision.verdicts)
        await service.plane.decider.start(deployment)
        observed = service.plane.observer.of("decode")
        assert observed.last_decision is not None
        assert all(
            (verdict.us_seen is not None) == fitted_curve for verdict in observed.last_decision.verdicts
        )


def par_of(group: FakeGroup) -> float:
    """Return the group's current PAR on heat like the prior's."""
    live = group.live
    return float(mean_par(par(rank_loads(skewed_heat(16, seed=5), live.placement, live.log2phy_RLE))))


async def test_the_first_plan_uses_the_priors_heat_and_later_plans_use_the_deployments_own_heat() -> None:
    async with (
        run_service(settings(prior="decode=prefill", decision_interval=64)) as service,
        FakeGroup(service.address) as prefill,
        FakeGroup(service.address) as decode,
    ):
        await decode.join()
        await until(lambda: service.plane.deployments["decode"].live is not None)
        tick(service.plane)
        assert service.plane.deployments["decode"].may_begin, "prefill has no heat yet"
        await prefill.join(deployment="prefill")
        await prefill.send_heat(skewed_heat(16))
        before = par_of(decode)
        await decode.carry_out(await decode.hear_plan())
        assert par_of(decode) < before - 0.5
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        assert deployment.last_decision.endswith("based on the heat of prefill")
        assert not deployment.may_begin
        await decode.send_heat(skewed_heat(64, seed=1))
        await until(lambda: deployment.session.time_price is not None)
        assert deployment.last_decision.startswith("every layer kept")


async def test_a_trace_is_a_prior_only_for_ranks_without_committed_layers(tmp_path: Path) -> None:
    trace = tmp_path / "prefill.npz"
    np.savez(trace, heat=skewed_heat(40))
    async with run_service(settings(prior=f"decode={trace}")) as service:
        async with FakeGroup(service.address) as first:
            await first.join()
            before = par_of(first)
            await first.carry_out(await first.hear_plan())
            assert par_of(first) < before - 0.5
            committed_layout = first.live
        async with FakeGroup(
            service.address, live_of(committed_layout.placement, committed_layout.epoch)
        ) as later:
            await later.join(group_id="second")
            deployment = service.plane.deployments["decode"]
            await until(
                lambda: deployment.live is not None and deployment.live.epoch == committed_layout.epoch
            )
            assert not deployment.may_begin


async def test_a_prior_from_a_different_model_is_reported_as_a_problem_and_no_plan_is_made(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "other.npz"
    np.savez(trace, heat=np.ones((4, LAYERS + 1, EXPERTS), dtype=np.int32))
    async with (
        run_service(settings(prior=f"decode={trace}")) as service,
        FakeGroup(service.address) as decode,
    ):
        await decode.join()
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.session.has_begun)
        (problem,) = deployment.plan_problems
        assert "choose a source that serves the same model" in problem
        assert deployment.plan is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill", "use DEPLOYMENT=SOURCE"),
        ("decode=", "use DEPLOYMENT=SOURCE"),
        ("decode=decode", "must not be the deployment itself"),
        ("decode=a,decode=b", "one source per deployment"),
        ("de code=a", "the deployment is"),
    ],
)
def test_invalid_prior_settings_are_rejected(text: str, why: str) -> None:
    with pytest.raises(PriorError, match=why):
        Priors(text, 16)


async def test_an_unreadable_prior_trace_is_rejected_at_startup(tmp_path: Path) -> None:
    trace = tmp_path / "notes.npz"
    trace.write_text("no trace")
    with pytest.raises(SettingsError, match=r"setting prior: .*notes"):
        async with run_service(settings(prior=f"decode={trace}")):
            pass
    np.savez(trace, heat=np.zeros((4, LAYERS, EXPERTS), dtype=np.int32))
    with pytest.raises(SettingsError, match="has any tokens"):
        async with run_service(settings(prior=f"decode={trace}")):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux threads have separate priorities")
def test_decision_threads_run_at_a_lower_priority():
    process_priority = os.getpriority(os.PRIO_PROCESS, 0)
    assert _on_thread(os.getpriority, os.PRIO_PROCESS, 0).result() == max(process_priority, 5)
    assert os.getpriority(os.PRIO_PROCESS, 0) == process_priority
