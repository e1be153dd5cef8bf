"""The observer of a rank, with a service in this process and without one."""

import asyncio
import contextlib
import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_core.heat.phase import StepPhase
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2
from eplb_service.control.server.service import run_service
from eplb_service.io.open_trace import open_trace
from tests.agent import live
from tests.control.server.service_under_test import settings as service_settings
from tests.control.server.service_under_test import tick
from tests.ranks import run_ranks
from worker_agent.observe.counter import RouterCounter
from worker_agent.observe.layout import ObservedLayout, linear
from worker_agent.observe.observer import Observer, Ranks, meet
from worker_agent.swap.rank_layout import check_plan

EXPERTS = 4
LAYERS = 2
IDS = torch.tensor([[0, 1], [0, 1], [0, 2]])
"""Choices of three tokens: rank 0 of the linear placement receives five of six."""
HALVES = [[0, 2], [1, 3]]
"""Placement under which each rank receives half of the choices in ``BALANCED``."""
BALANCED = torch.tensor([[0, 1], [0, 1], [0, 1]])


def layout_of(*rows_RS):
    """Return a layout with these placements, one for each layer."""
    return ObservedLayout(np.array(rows_RS, dtype=np.int32), EXPERTS)


def made(rank=0, token_groups=(0, 0), **changes):
    """Return an observer and its model's counter."""
    counter = RouterCounter(LAYERS, EXPERTS, torch.device("cpu"))
    has_service = changes.pop("has_service", False)
    store = changes.pop("store", None)
    ranks = Ranks(rank, "the group", token_groups)
    layout = changes.pop("layout", ObservedLayout(linear(LAYERS, EXPERTS, len(token_groups)), EXPERTS))
    settings = live.settings(**changes)
    return Observer(counter.rings, layout, ranks, settings, store, has_service=has_service), counter


def run(observer, counter, ids, passes=1, phase=StepPhase.DECODE):
    for _ in range(passes):
        observer.before_pass()
        counter.expect(len(ids))
        for layer in range(LAYERS):
            counter.count(layer, ids)
        counter.record(counts=observer._ranks.counts)
        observer.after_pass(phase, len(ids) if observer._ranks.rank == 0 else 0)


def test_without_a_service_a_line_and_a_trace_cover_all_passes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "eplb.agent")
    observer, counter = made(log_interval_steps=32, trace=tmp_path / "heat.npz")
    # The engine warms up before the first observed pass.
    for layer in range(LAYERS):
        counter.count(layer, IDS)
    run(observer, counter, IDS, 40)
    observer.close(60)
    (line,) = caplog.messages
    assert line.startswith(
        "imbalance 1.667 (PAR) over 32 forward passes; hottest rank 0 (1.67 times the mean)"
    )
    assert "96 tokens" in line
    trace = open_trace(tmp_path / "heat.npz")
    assert trace.steps == 40
    assert trace.heat(0, 40).sum(axis=0).tolist() == [[120, 80, 40, 0]] * LAYERS


def test_a_layout_change_applies_from_the_next_pass_on(caplog):
    caplog.set_level(logging.INFO, "eplb.agent")
    observer, counter = made(log_interval_steps=16)
    run(observer, counter, BALANCED, 15)
    # The engine moves experts within the 16th pass, which is still served under the old layout.
    observer.before_pass()
    counter.expect(3)
    for layer in range(LAYERS):
        counter.count(layer, BALANCED)
    counter.record()
    observer.placed(layout_of(HALVES, HALVES))
    assert observer.layout.phy2log_LRS.tolist() == [HALVES, HALVES]
    observer.after_pass(StepPhase.DECODE, 3)
    assert observer.installed.epoch == 0
    run(observer, counter, BALANCED, 16)
    assert observer.installed.epoch == LAYERS
    observer.close(60)
    assert [line.partition(" (PAR)")[0] for line in caplog.messages] == ["imbalance 2.000", "imbalance 1.000"]


def test_an_error_ends_the_observation_but_not_the_engine(caplog):
    observer, counter = made()
    run(observer, counter, IDS)
    observer.placed(ObservedLayout(linear(LAYERS, EXPERTS, 1), EXPERTS))
    run(observer, counter, IDS, 2)
    assert observer.stopped
    (message,) = caplog.messages
    assert message == "rank 0: eplb-agent no longer observes this engine, which is not affected"
    observer.close(60)


@contextlib.asynccontextmanager
async def observed(service, count=2, **changes):
    """Yield observers of several ranks that share tokens, connected to a service."""
    pairs = [
        made(rank, (0,) * count, has_service=True, service=service.address, deployment="seen", **changes)
        for rank in range(count)
    ]
    try:
        yield pairs
    finally:
        await asyncio.to_thread(lambda: [observer.close(60) for observer, _ in pairs])


async def serve(pairs, ids, true, rest=0.002):
    """Run passes until ``true`` returns True."""
    async with asyncio.timeout(60):
        while not true():
            for observer, counter in pairs:
                run(observer, counter, ids)
            await asyncio.sleep(rest)


async def test_a_service_measures_the_layout_that_the_engine_serves():
    async with run_service(service_settings(heartbeat_seconds=0.1)) as service, observed(service) as pairs:
        plane = service.plane

        def heat():
            deployment = plane.deployments.get("seen")
            return None if deployment is None else deployment.heat

        def par(newest=16):
            return float(np.nanmean(heat().served_par(newest)))

        await serve(pairs, BALANCED, lambda: heat() is not None and heat().steps >= 32)
        deployment = plane.deployments["seen"]
        assert deployment.observed
        assert par() == 2.0
        tick(plane)
        # The engine moves experts. A service asks for new Hellos, and measures under the new layout.
        for observer, _ in pairs:
            observer.placed(layout_of(HALVES, [[0, 1], [2, 3]]))
        await serve(pairs, BALANCED, lambda: deployment.live is not None and deployment.live.epoch == 1)
        before = heat().assembled
        await serve(pairs, BALANCED, lambda: heat().assembled >= before + 32)
        assert par() == 1.5
        # Heat of the passes after the move waited for the new layout.
        assert (deployment.totals.steps_lost, [observer._outbox.dropped_steps for observer, _ in pairs]) == (
            0,
            [0, 0],
        )
        assert deployment.live.placement.phy2log_LRS.tolist() == [HALVES, [[0, 1], [2, 3]]]
        assert deployment.totals.layers_switched == 0
        tick(plane)
        assert deployment.last_decision == ""
        assert not deployment.attendance.rejections
        assert all(observer.installed.epoch == 1 for observer, _ in pairs)


async def test_an_expert_that_is_twice_on_a_rank_is_measured_as_served():
    doubled = layout_of(*[[[0, 0, 1], [2, 3, 0]]] * LAYERS)
    async with run_service(service_settings()) as service, observed(service, layout=doubled) as pairs:
        plane = service.plane
        ids = torch.tensor([[0, 3]] * 12)

        def steps():
            deployment = plane.deployments.get("seen")
            return 0 if deployment is None or deployment.heat is None else deployment.heat.steps

        await serve(pairs, ids, lambda: steps() >= 32)
        _, loads_LR = plane.deployments["seen"].heat.load_sums(24)
        # Rank 0 computes two thirds of expert 0's tokens. Rank 1 computes the rest and those of expert 3. Replicas are
        # drawn at random. If both ranks had half of expert 0's tokens, rank 0 would have a quarter of all tokens.
        assert loads_LR[0] / loads_LR[0].sum() == pytest.approx([1 / 3, 2 / 3], abs=0.05)


def test_an_observer_rejects_every_plan():
    observer, _ = made()
    identity = observer._identity(observer.layout)
    with pytest.raises(WireError, match="only observes"):
        check_plan(agent_pb2.Plan(plan_id=3), identity, observer.installed)
    observer.close(60)


def met():
    ranks, facts = meet(f"facts of {dist.get_rank()}", None if dist.get_rank() == 2 else 0, dist.group.WORLD)
    return ranks, facts


def test_the_ranks_agree_on_their_group():
    results = run_ranks(3, met)
    assert len({ranks.group_id for ranks, _ in results}) == 1
    assert [ranks.rank for ranks, _ in results] == [0, 1, 2]
    assert all(ranks.token_groups == (0, 0, 2) for ranks, _ in results)
    assert [ranks.counts for ranks, _ in results] == [True, False, True]
    assert all(facts == ["facts of 0", "facts of 1", "facts of 2"] for _, facts in results)


def test_a_single_rank_needs_no_group():
    ranks, facts = meet("facts", None, None)
    assert (ranks.rank, ranks.token_groups, ranks.counting, facts) == (0, (0,), [0], ["facts"])


@pytest.mark.parametrize("service", ["", "127.0.0.1:9"])
def test_rank_0_logs_at_the_start_that_it_observes_and_where_reports_go(
    service, caplog, monkeypatch, tmp_path
):
    caplog.set_level(logging.INFO, "eplb.agent")
    monkeypatch.setenv("EPLB_AGENT_DATA_HOST", "127.0.0.1")
    monkeypatch.setenv("EPLB_AGENT_DEPLOYMNT", "decode")
    if service:
        monkeypatch.setenv("EPLB_AGENT_SERVICE", service)
    else:
        monkeypatch.setenv("EPLB_AGENT_TRACE", str(tmp_path / "heat.npz"))
    counter = RouterCounter(LAYERS, EXPERTS, torch.device("cpu"))
    layout = ObservedLayout(linear(LAYERS, EXPERTS, 2), EXPERTS)
    observer = Observer.start(counter.rings, layout, Ranks(0, "group", (0, 0)), "an engine", "A note")
    observer.close(60)
    misspelt, started = caplog.messages[:2]
    assert misspelt.startswith("EPLB_AGENT_DEPLOYMNT is not a setting")
    assert started.startswith(
        "eplb-agent observes 2 MoE layers of 4 experts over 2 ranks of 2 slots in an engine"
    )
    assert ("deployment default at 127.0.0.1:9" if service else "heat.npz") in started
    assert started.endswith(". A note")
