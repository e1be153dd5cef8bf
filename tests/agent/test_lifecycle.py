"""Ranks that drain, close or lose their votes agree on the outcome of a plan, and every wait is bounded."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from eplb_core.wire.heat import HeatReport
from tests.agent import live
from tests.agent.live import RANKS
from tests.faults.serving import FAULTS
from tests.ranks import RankFailure, run_ranks


def _drain_in_the_middle() -> dict[str, Any]:
    """Drain during a slow transfer, then resume and switch once more."""
    # Staging has no room for two layers, so layers are switched one at a time.
    agent, layers, still = live.start(2, bytes_per_step=2000, transfer_timeout_seconds=10, staging_mib=0)
    plan = {0: live.target(1), 1: live.target(2)}
    worst = live.drive(agent, layers, still, 12, live.offering(agent, {1: plan}))
    began = time.monotonic()
    agent.drain("the host sleeps")
    facts: dict[str, Any] = {"drained": time.monotonic() - began}
    facts["busy"] = agent._switch.transfers.running or agent._switch.state.plan is not None
    live.offer(agent, {0: live.from_here(agent, 3)}, plan_id=2)
    worst = max(worst, live.drive(agent, layers, still, 12))
    facts["refused"] = agent._switch.state.plan is None
    agent.resume()
    before = agent.installed.epoch
    live.offer(agent, {0: live.from_here(agent, 4)}, plan_id=3)
    worst = max(worst, live.drive(agent, layers, still, 60, lambda _: time.sleep(0.005), before + 1))
    facts["switched"] = agent.installed.epoch - before
    items = live.waiting(agent)
    reports = [item for item in items if isinstance(item, HeatReport)]
    facts["untimed"] = [
        report.first_step + i for report in reports for i in np.flatnonzero(report.micros_T == 0)
    ]
    facts["reasons"] = [item.reason for item in items if not isinstance(item, HeatReport) and item.reason]
    facts["beat"] = agent._beat()
    facts["calls"] = agent._clock.calls
    facts["staged"] = agent._switch.transfers.staging.nbytes
    facts["rings"] = sum(ring.nbytes for layer in layers for ring in (layer.moe_load, layer.source_load))
    return live.facts(agent, worst, **facts)


def test_drain_ends_the_current_plan_and_resume_accepts_plans_again() -> None:
    facts = run_ranks(RANKS, _drain_in_the_middle)
    live.check_together(facts)
    for fact in facts:
        assert not fact["busy"]
        assert fact["untimed"] == [0, 12], (
            "only the first step and the first step after the drain should have no time"
        )
        assert fact["drained"] < 15
        assert fact["refused"]
        assert fact["reasons"] == ["the host sleeps", "balancing is paused on this rank: the host sleeps"]
        assert fact["switched"] == 1
        assert fact["beat"].calls == fact["calls"] >= 24
        assert 0 < fact["beat"].vote_micros < fact["beat"].call_micros
        assert fact["staged"] > 0, "the rank has not received any experts"
        assert (fact["beat"].staging_bytes, fact["beat"].ring_bytes) == (fact["staged"], fact["rings"])


def _leave_early(how: str, early_step: int) -> dict[str, Any]:
    """Make rank 1 close or stop voting at ``early_step``, while a plan offered at step 1 is in progress."""
    agent, layers, still = live.start(1, vote_interval=4, vote_lag=3)
    offered = live.offering(agent, {1: {0: live.target()}}, pause=0.02)

    def between(step: int) -> None:
        offered(step)
        if step == early_step and agent.identity.rank == 1:
            agent.close() if how == "closes" else FAULTS["lose-votes"](agent)

    began = time.monotonic()
    worst = live.drive(agent, layers, still, 40, between)
    # The peers notice immediately instead of waiting for the vote timeout of 60 s.
    assert time.monotonic() - began < 30
    return live.facts(agent, worst)


SLOWLY = [
    pytest.param(how, step, marks=pytest.mark.slow) for how in ("closes", "leaves") for step in range(8, 13)
]


@pytest.mark.parametrize(("how", "step"), [("closes", 10), ("leaves", 11), *SLOWLY])
def test_a_rank_that_leaves_during_a_commit_agrees_with_its_peers(how: str, step: int) -> None:
    """The vote launched at step 8 commits the layer at step 11. The peers may already know that all ranks are ready."""
    live.check_together(run_ranks(RANKS, _leave_early, how, step))


def _all_close_one_after_the_other(order: list[int]) -> None:
    """Close the ranks in this order during a vote that commits a layer.

    Each process except the last exits once its rank has closed.
    """
    agent, layers, still = live.start(1, vote_interval=4, vote_lag=4)
    live.drive(agent, layers, still, 8 + 1, live.offering(agent, {0: {0: live.target()}}, pause=0.05))
    time.sleep(0.5 * order.index(agent.identity.rank))
    agent.close()
    if agent.identity.rank != order[-1]:
        os._exit(0)


@pytest.mark.parametrize("order", [[0, 1, 2], pytest.param([2, 0, 1], marks=pytest.mark.slow)])
def test_ranks_that_leave_one_after_another_log_no_errors(order: list[int]) -> None:
    with pytest.raises(RankFailure) as ended:
        run_ranks(RANKS, _all_close_one_after_the_other, order)
    assert "Traceback" not in str(ended.value)


def _not_counting() -> str:
    agent, layers, still = live.start(1, heat_deadline_calls=20)
    for layer in layers:
        layer._record = lambda *_, **__: None
    live.drive(agent, layers, still, 60)
    reported = str(agent._beat().error)
    agent.close()
    return reported


def test_a_host_that_stops_counting_is_reported() -> None:
    reported = run_ranks(2, _not_counting)
    assert all("no valid heat counts for" in error for error in reported)
