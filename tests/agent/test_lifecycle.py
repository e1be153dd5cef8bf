"""Ranks drain, close and lose votes or links: always together, never waiting without a deadline."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from eplb_service.wire.heat import HeatReport
from tests.agent import live
from tests.agent.live import RANKS
from tests.ranks import RankFailure, run_ranks
from worker_agent.swap.ballot import Ballot, Progress
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.vote import BallotBox, VoteError


def _drain_in_the_middle() -> dict[str, Any]:
    """A plan is being transferred, slowly, when the host wants to sleep."""
    agent, layers, still = live.start(2, bytes_per_step=2000, transfer_timeout_seconds=10)

    def between(step: int) -> None:
        if step == 1:
            agent._stream.plans.put(live.plan_for(agent, {0: live.target(1), 1: live.target(2)}))
        time.sleep(0.002)

    worst = live.drive(agent, layers, still, 12, between)
    began = time.monotonic()
    agent.drain("the host sleeps")
    drained = time.monotonic() - began
    facts = {
        "running": agent._switch.transfers.running,
        "plan": agent._switch.state.plan_under_way,
        "drained": drained,
    }
    agent._stream.plans.put(live.plan_for(agent, {0: live.from_here(agent, 3)}, plan_id=2))
    worst = max(worst, live.drive(agent, layers, still, 12))
    facts["refused"] = agent._switch.state.plan_under_way is None
    agent.resume()
    before = agent.installed.epoch
    agent._stream.plans.put(live.plan_for(agent, {0: live.from_here(agent, 4)}, plan_id=3))
    worst = max(worst, live.drive(agent, layers, still, 60, lambda _: time.sleep(0.005), before + 1))
    facts |= {"worst": worst, "switched": agent.installed.epoch - before, "halted": agent.halted}
    reasons = []
    untimed: list[int] = []
    while (item := agent._outbox.take(timeout=0)) is not None:
        reasons += [item.reason] if hasattr(item, "reason") else []
        if isinstance(item, HeatReport):
            assert item.micros_T is not None
            untimed += (item.first_step + np.flatnonzero(item.micros_T == 0)).tolist()
    facts["untimed"] = untimed
    facts["reasons"] = [reason for reason in reasons if reason]
    facts["beat"], facts["calls"] = agent._beat(), agent._calls
    facts["staged"] = agent._switch.transfers.staging.nbytes
    rings = [ring for layer in layers for ring in (layer.moe_load, layer.source_load) if ring is not None]
    facts["rings"] = sum(ring.numel() * ring.element_size() for ring in rings)
    agent.close()
    return facts


def test_drain_ends_what_is_under_way_and_resume_takes_plans_again() -> None:
    facts = run_ranks(RANKS, _drain_in_the_middle)
    for fact in facts:
        assert fact["worst"] < 1e-5
        assert not fact["running"]
        assert fact["plan"] is None
        assert fact["untimed"] == [0, 12], "the first step, and the first after the host slept, have no time"
        assert fact["drained"] < 15
        assert fact["refused"]
        assert fact["reasons"] == ["the host sleeps", "balancing is paused on this rank: the host sleeps"]
        assert fact["halted"] is None
        assert fact["switched"] == 1
        assert fact["beat"].calls == fact["calls"] >= 24
        assert 0 < fact["beat"].vote_micros < fact["beat"].call_micros
        assert fact["staged"] > 0, "experts have been received"
        assert (fact["beat"].staging_bytes, fact["beat"].ring_bytes) == (fact["staged"], fact["rings"])


def _close_at_a_time_of_its_own(early_rank: int, early_step: int) -> dict[str, Any]:
    agent, layers, still = live.start(1, vote_interval=4, vote_lag=3)

    def between(step: int) -> None:
        if step == 1:
            agent._stream.plans.put(live.plan_for(agent, {0: live.target()}))
        if step == early_step and agent.identity.rank == early_rank:
            agent.close()
        time.sleep(0.02)

    worst = live.drive(agent, layers, still, 40, between)
    facts = {"worst": worst, "epoch": agent.installed.epoch, "halted": agent.halted}
    agent.close()
    return facts


@pytest.mark.parametrize(
    "early_step", [pytest.param(step, marks=[] if step == 10 else pytest.mark.slow) for step in range(8, 13)]
)
def test_a_rank_may_close_while_the_vote_that_commits_is_under_way(early_step: int) -> None:
    """The vote launched at step 8 commits the layer at step 11: closing around it leaves all at one placement."""
    facts = run_ranks(RANKS, _close_at_a_time_of_its_own, 1, early_step)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert len({fact["epoch"] for fact in facts}) == 1


def _all_close_one_after_the_other(order: list[int]) -> None:
    """Each rank ends its process as soon as it has closed; a vote that is to commit a layer is under way."""
    agent, layers, still = live.start(1, vote_interval=4, vote_lag=4)
    agent._stream.plans.put(live.plan_for(agent, {0: live.target()}))
    live.drive(agent, layers, still, 8 + 1, lambda _: time.sleep(0.05))
    time.sleep(0.5 * order.index(agent.identity.rank))
    agent.close()
    if agent.identity.rank != order[-1]:
        os._exit(0)


@pytest.mark.parametrize("order", [[0, 1, 2], pytest.param([2, 0, 1], marks=pytest.mark.slow)])
def test_ranks_that_leave_one_after_the_other_leave_quietly(order: list[int]) -> None:
    with pytest.raises(RankFailure) as ended:
        run_ranks(RANKS, _all_close_one_after_the_other, order)
    assert "Traceback" not in str(ended.value)


def _lose_the_votes(lost_step: int) -> dict[str, Any]:
    agent, layers, still = live.start(1, vote_interval=4, vote_lag=3)

    def between(step: int) -> None:
        if step == 1:
            agent._stream.plans.put(live.plan_for(agent, {0: live.target()}))
        if step == lost_step and agent.identity.rank == 1:
            assert agent._switch.votes.voter is not None
            agent._switch.votes.voter.box.leave()
        time.sleep(0.02)

    worst = live.drive(agent, layers, still, 40, between)
    facts = {"worst": worst, "epoch": agent.installed.epoch, "halted": agent.halted}
    agent.close()
    return facts


@pytest.mark.parametrize(
    "lost_step", [pytest.param(step, marks=[] if step == 11 else pytest.mark.slow) for step in range(8, 12)]
)
def test_a_rank_that_never_hears_the_vote_that_commits_does_as_the_others(lost_step: int) -> None:
    """Its ballot was in that vote: the others may have heard that all are ready."""
    facts = run_ranks(RANKS, _lose_the_votes, lost_step)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert len({fact["epoch"] for fact in facts}) == 1
    assert [fact["halted"] for fact in facts] == [None] * RANKS


def _heal(fault: str) -> dict[str, Any]:
    """Rank 1 breaks the votes of all where its ballot is due, twice; plans come later."""
    agent, layers, still = live.start(1, vote_timeout_seconds=1.0, idle_vote_interval=4)
    call, passed = agent.step, 0
    unheard: set[str] = set()

    def step() -> None:
        nonlocal passed
        passed += 1
        votes = agent._switch.votes.voter
        if (
            agent.identity.rank == 1
            and fault == "missed calls"
            and passed in (*range(12, 17), *range(200, 205))
        ):
            return
        if agent.identity.rank == 1 and fault == "lost link" and passed in (12, 200) and votes is not None:
            votes.box.leave()
        call()
        if agent.unheard is not None:
            unheard.add(agent.unheard)

    def between(step: int) -> None:
        if step > 300 and agent._switch.votes.voter is not None and agent._switch.state.plan is None:
            agent._stream.plans.put(live.plan_for(agent, {0: live.from_here(agent, 3)}))
        time.sleep(0.01)

    agent.step = step  # type: ignore[method-assign]
    worst = live.drive(agent, layers, still, 310, between, epoch=1)
    agent.close()
    return {
        "worst": worst,
        "epoch": agent.installed.epoch,
        "halted": agent.halted,
        "unheard": bool(unheard),
        "digest": agent.installed.digest,
    }


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost link", "missed calls"])
def test_votes_that_are_lost_come_back_by_themselves(fault: str) -> None:
    facts = run_ranks(RANKS, _heal, fault)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert all(fact["unheard"] for fact in facts)
    assert [fact["halted"] for fact in facts] == [None] * RANKS
    assert len({(fact["epoch"], fact["digest"]) for fact in facts}) == 1


def _whole_vote(votes: BallotBox, ballot: Ballot) -> None:
    votes.launch(ballot)
    votes.consume()


def _votes_break() -> list[float]:
    """Rank 1 leaves with a vote of rank 0 under way; nobody waits for the timeout."""
    group, _ = AgentGroup.join(dist.group.WORLD, "here", "127.0.0.1", None)
    votes = BallotBox(group.process_group("vote", timedelta(seconds=60)), 1, timedelta(seconds=60))
    ballot = Ballot(Progress.IDLE, 0, 1, abort=False)
    votes.launch(ballot)
    votes.consume()
    waited = []
    if group.rank == 1:
        votes.leave()
    else:
        began = time.monotonic()
        with pytest.raises(VoteError):
            _whole_vote(votes, ballot)
        waited.append(time.monotonic() - began)
        began = time.monotonic()
        votes.leave()
        waited.append(time.monotonic() - began)
    return waited


def test_a_rank_that_leaves_the_votes_is_noticed_at_once() -> None:
    waits = [seconds for rank in run_ranks(RANKS, _votes_break) for seconds in rank]
    assert max(waits) < 30


def _corrupted() -> dict[str, Any]:
    agent, layers, still = live.start(1, verify_transfers=True, transfer_timeout_seconds=20)
    from tests.faults.serving import FAULTS

    if agent.identity.rank == 0:
        FAULTS["corrupt-next-transfer"](agent)
    worst = live.drive(agent, layers, still, 60, live.planned_again(agent, live.target()), epoch=1)
    reasons = []
    while (item := agent._outbox.take(timeout=0)) is not None:
        reasons += [item.reason] if hasattr(item, "reason") else []
    agent.close()
    return {"worst": worst, "epoch": agent.installed.epoch, "reasons": [r for r in reasons if r]}


def test_an_expert_that_arrives_damaged_is_never_installed() -> None:
    facts = run_ranks(RANKS, _corrupted)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["epoch"] for fact in facts] == [1] * RANKS
    assert any("has the checksum" in reason for reason in facts[0]["reasons"])


def _not_counting() -> str:
    agent, layers, still = live.start(1, heat_deadline_steps=20)
    for layer in layers:
        layer._record = lambda *_: None
    live.drive(agent, layers, still, 60)
    reported = str(agent._beat().error)
    agent.close()
    return reported


def test_a_host_that_stops_counting_is_reported() -> None:
    reported = run_ranks(2, _not_counting)
    assert all("no valid count of heat for" in one for one in reported)


def test_targets_are_real_switches() -> None:
    assert not np.array_equal(live.target(), live.linear_RS(RANKS))
