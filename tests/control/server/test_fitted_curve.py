"""A service may plan by a cost curve fitted to its ranks' own step times, and does only where it is asked to."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.control.server.service import running_service
from eplb_service.cost.curve import CostCurve
from eplb_service.placement import Int32
from eplb_service.planner.settings import PlannerSettings, SettingsError
from eplb_service.wire.codec import unpack
from tests.control.fake_group import EXPERTS, LAYERS, RANKS, SLOTS, FakeGroup, heat_report
from tests.control.server.test_service import settings, until

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
        await until(lambda: deployment.decisions.worth is not None)
        assert deployment.decisions.worth is not None
        assert deployment.decisions.worth.price.kind == "fitted", deployment.decisions.worth.price.reason
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


@pytest.mark.parametrize("other", [{"expert_groups": 2}, {"split": "step"}])
def test_what_planning_for_time_cannot_do_is_refused_beside_it(other: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"fitted_curve and .* do not go together"):
        PlannerSettings(fitted_curve=True, **other)  # type: ignore[arg-type]
