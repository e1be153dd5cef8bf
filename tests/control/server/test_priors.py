"""A deployment's first plan may come from the heat of another, before it has served anything itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_service.control.server.deciding.computing import PriorError, Priors
from eplb_service.control.server.service import running_service
from eplb_service.control.server.settings import SettingsError
from eplb_service.placement import mean_par, par
from eplb_service.planner.score import rank_loads
from tests.control.fake_group import EXPERTS, LAYERS, FakeGroup, live_of, skewed_heat
from tests.control.server.test_service import settings, tick, until


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
        await until(lambda: deployment.decisions.worth is not None)
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
        assert "heat of another model" in problem
        assert deployment.plan is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill", "write DEPLOYMENT=SOURCE"),
        ("decode=", "write DEPLOYMENT=SOURCE"),
        ("decode=decode", "not itself"),
        ("decode=a,decode=b", "one for each"),
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
