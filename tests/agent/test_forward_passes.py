"""Layers switch at agreed forward passes, not after a number of host calls, so a missed call changes no output."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.agent import live
from tests.agent.counting_layer import CountingLayer
from tests.ranks import RankFailure, run_ranks
from worker_agent.agent import Agent
from worker_agent.forward_clock import ForwardClock, StepTimer, Stopwatch
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.rendezvous import RendezvousError

RANKS = 2


def _switching(missed: int) -> dict[str, Any]:
    """Switch layers continuously while rank 1 skips the call after forward pass ``missed``."""
    agent, layers, still = live.start(2, commit_timeout_seconds=0.5)
    call = agent.step
    passes = itertools.count(1)

    def step() -> None:
        if next(passes) != missed or dist.get_rank() != 1:
            call()

    agent.step = step

    def between(step: int) -> None:
        installed = agent.installed
        if agent._switch.state.plan is None and step % 4 == 1:
            changed = {
                layer: live.from_here(agent, 10 * installed.epoch + layer, layer) for layer in range(2)
            }
            live.offer(agent, changed, plan_id=installed.epoch + 1)
        time.sleep(0.003)

    return live.facts(agent, live.drive(agent, layers, still, 120, between))


@pytest.mark.parametrize(
    "missed", [pytest.param(step, marks=[] if step == 43 else pytest.mark.slow) for step in range(40, 44)]
)
def test_a_step_boundary_missed_at_any_point_of_a_vote_changes_no_output(missed: int) -> None:
    """At one of these boundaries, the peers are about to commit. They wait for the rank and then do not commit."""
    live.check_together(run_ranks(RANKS, _switching, missed))


def _no_memory_to_decide() -> None:
    """Make rank 1 run out of memory for a committed layer's layout."""
    agent, layers, still = live.start(2)
    offered = live.offering(agent, {1: {0: live.from_here(agent, 1)}}, pause=0.005)

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for a placement")

    def between(step: int) -> None:
        offered(step)
        if step == 3 and dist.get_rank() == 1:
            type(agent.installed).with_layer = fail

    with pytest.raises(FatalSwitchError) as fatal:
        live.drive(agent, layers, still, 40, between)
    with pytest.raises(FatalSwitchError):
        agent.step()
    raise fatal.value


def test_an_agent_that_cannot_apply_a_votes_outcome_stops_serving() -> None:
    with pytest.raises(RankFailure, match=r"FatalSwitchError.*no memory for a placement"):
        run_ranks(RANKS, _no_memory_to_decide)


def _diverged() -> str:
    agent, layers, still = live.start(2)
    if dist.get_rank() == 1:
        installed = agent.installed
        astray = installed.with_layer(0, installed.placement.phy2log_LRS[0], installed.log2phy_LE[0])
        object.__setattr__(agent._switch.state, "installed", astray)
    with pytest.raises(FatalSwitchError) as fatal:
        live.drive(agent, layers, still, 20)
    agent.close()
    return str(fatal.value)


def test_all_ranks_stop_if_their_layouts_differ() -> None:
    assert all("the ranks serve different placements" in error for error in run_ranks(RANKS, _diverged))


def _shared_tokens(token_group: int | str | None) -> str:
    if token_group == "pairs":
        token_group = dist.get_rank() // 2
    layers = live.layers_of(1, live.linear_RS(dist.get_world_size()), dispatcher="allgather")
    try:
        Agent.start(layers, dist.group.WORLD, live.settings(), token_group=token_group).close()
    except RendezvousError as error:
        return str(error)
    return ""


def test_layers_that_share_tokens_require_a_token_group() -> None:
    assert all("its layers share tokens" in error for error in run_ranks(RANKS, _shared_tokens, None))
    assert run_ranks(RANKS, _shared_tokens, 0) == ["", ""]


def test_layers_that_gather_from_all_ranks_require_one_token_group() -> None:
    errors = run_ranks(4, _shared_tokens, "pairs")
    assert all(
        "gather the tokens of all ranks, but the ranks are in the token groups [0, 1]" in error
        for error in errors
    )


@pytest.mark.parametrize(
    ("counted", "complaint"),
    [
        (200, None),
        (100, "has not grown in 100 calls"),
        (3, "has decreased from 100 to 3; the ranks cannot switch layers until it exceeds 100"),
    ],
)
def test_a_counter_that_stalls_or_restarts_is_reported(counted, complaint) -> None:
    layer: Any = CountingLayer()
    clock = ForwardClock([layer])
    for passes in (*range(1, 101), *(min(counted, 100 + extra) for extra in range(1, 101))):
        layer.load_counter.fill_(passes)
        clock.called()
    assert (clock.complaint is None) == (complaint is None)
    assert complaint is None or re.search(complaint, clock.complaint)


def test_the_step_timer_excludes_pauses_and_laps_of_several_steps() -> None:
    """A lap is 0 (unknown) after a pause or if it spans several steps, and at least 1 otherwise."""
    micros = (0, 2_500, 3_000, 3_000.1, 4_000, 4_700, 60_000_000, 60_000_900)
    timer = StepTimer(iter([int(1000 * time_us) for time_us in micros]).__next__)
    laps = [*(timer.lap() for _ in range(4)), timer.lap(passes=2), timer.lap()]
    timer.pause()
    laps += [timer.lap(), timer.lap()]
    assert laps == [0, 2500, 500, 1, 0, 700, 0, 900]


def test_the_stopwatch_includes_the_time_of_failing_calls() -> None:
    watch = Stopwatch(iter([0, 40_000, 100_000, 167_000]).__next__)
    with watch:
        pass
    with pytest.raises(RuntimeError, match="fatal"), watch:
        raise RuntimeError("fatal")
    assert watch.micros == 107
