"""The switch machines of three ranks act together: each story ends with one placement on all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import default_log2phy
from tests.swap.world import LINEAR, OFFER_DEADLINE, RANKS, World, layer_RS
from worker_agent.swap.actions import Aborted, Diverged, Refused
from worker_agent.swap.ballot import Progress


def test_a_plan_that_all_hold_is_transferred_and_committed_layer_by_layer() -> None:
    world = World()
    world.deliver(world.plan(1, [(1, 1), (0, 2)]))
    world.vote()
    world.end_transfers()
    world.vote()
    assert [machine.installed.epoch for machine in world.ranks] == [1] * RANKS
    world.end_transfers()
    world.vote()
    installed = world.ranks[0].installed
    assert installed.epoch == 2
    assert installed.layer_epochs == (2, 1)
    assert (installed.placement.phy2log_LRS[1] == layer_RS(1)).all()
    assert (installed.placement.phy2log_LRS[0] == layer_RS(2)).all()
    wanted = ["Accepted", "StartTransfer", "Commit", "StartTransfer", "Commit"]
    assert [world.action_kinds(rank) for rank in range(RANKS)] == [wanted] * RANKS


def test_nothing_starts_before_the_last_rank_holds_the_plan() -> None:
    world = World()
    plans = world.plan(1)
    world.deliver(plans, 0, 1)
    world.vote()
    assert all(transfer is None for transfer in world.transfers)
    world.deliver(plans, 2)
    world.vote()
    assert all(transfer is not None for transfer in world.transfers)


def test_a_plan_that_one_rank_never_gets_is_dropped_after_the_deadline() -> None:
    world = World()
    world.deliver(world.plan(1), 0, 2)
    world.pass_steps(OFFER_DEADLINE + 1)
    world.vote()
    assert [machine.progress for machine in world.ranks] == [Progress.IDLE] * RANKS
    world.deliver(world.plan(2))
    world.vote()
    world.end_transfers()
    world.vote()
    assert world.ranks[1].installed.epoch == 1


def test_one_rank_that_is_not_ready_holds_the_commit_back() -> None:
    world = World()
    world.deliver(world.plan(1))
    world.vote()
    world.end_transfer(0)
    world.end_transfer(1)
    world.vote()
    assert world.ranks[0].installed.epoch == 0
    world.end_transfer(2)
    world.vote()
    assert world.ranks[0].installed.epoch == 1


def test_a_failed_transfer_aborts_on_all_ranks_and_moves_them_to_a_fresh_lane() -> None:
    world = World()
    world.deliver(world.plan(1))
    world.vote()
    world.end_transfer(1, error="link down")
    world.end_transfer(0)
    world.vote()
    aborted = [next(a for a in actions if isinstance(a, Aborted)) for actions in world.actions]
    assert aborted[1].reason == "link down"
    assert aborted[0].reason == "another rank voted to abort"
    assert [machine.lane for machine in world.ranks] == [1] * RANKS
    assert world.ranks[0].installed.placement.phy2log_LRS.tolist() == LINEAR.phy2log_LRS.tolist()
    # Rank 2's transfer still runs out: it takes nothing new until then.
    world.deliver(world.plan(2))
    assert isinstance(world.actions[2][-1], Refused)
    world.end_transfer(2, error="deadline")
    world.pass_steps(OFFER_DEADLINE + 1)
    world.vote()
    world.deliver(world.plan(3))
    world.vote()
    assert {transfer.lane for transfer in world.transfers if transfer is not None} == {1}


def test_what_fails_after_ready_was_voted_waits_for_the_outcome() -> None:
    world = World()
    world.deliver(world.plan(1, [(0, 1), (1, 1)]))
    world.vote()
    world.end_transfers()
    world.launch_vote()
    world.halt(1)
    world.count_vote()
    assert [machine.installed.epoch for machine in world.ranks] == [1] * RANKS
    world.end_transfers()
    world.vote()
    assert [machine.installed.epoch for machine in world.ranks] == [1] * RANKS
    assert [machine.progress for machine in world.ranks] == [Progress.IDLE] * RANKS


def test_ranks_that_hold_different_plans_drop_both() -> None:
    world = World()
    one, other = world.plan(1, [(0, 1)]), world.plan(2, [(0, 2)])
    world.deliver(one, 0, 1)
    world.deliver(other, 2)
    world.vote()
    assert [machine.progress for machine in world.ranks] == [Progress.IDLE] * RANKS


def test_duplicates_are_ignored_and_stale_plans_refused() -> None:
    world = World()
    plans = world.plan(1, term=2)
    stale_base = world.plan(2)
    world.deliver(plans)
    world.deliver(plans)
    assert world.action_kinds(0) == ["Accepted"]
    world.vote()
    world.end_transfers()
    world.vote()
    world.deliver(stale_base)
    assert isinstance(world.actions[0][-1], Refused)
    world.deliver(world.plan(3, term=1))
    refusal = world.actions[0][-1]
    assert isinstance(refusal, Refused)
    assert "leader term 1 is older than 2" in refusal.reason


def test_ranks_that_serve_different_placements_serve_no_more() -> None:
    world = World()
    other_RS = layer_RS(1)
    other_E = default_log2phy(other_RS, world.ranks[1].installed.placement.experts)[1]
    changed = world.ranks[1].installed.with_layer(0, other_RS, other_E)
    world.ranks[1] = replace(world.ranks[1], installed=changed)
    world.launch_vote()
    ballots = [machine.ballot for machine in world.ranks]
    assert len({ballot.installed for ballot in ballots}) == 2
    # The world sees it too.
    with pytest.raises(AssertionError):
        world.count_vote()
    assert all(actions[-1] == Diverged("the ranks serve different placements") for actions in world.actions)


def test_a_halted_rank_votes_plans_down_that_it_never_held() -> None:
    world = World()
    world.halt(2)
    world.deliver(world.plan(1), 0, 1)
    world.vote()
    assert [machine.progress for machine in world.ranks] == [Progress.IDLE] * RANKS
    assert [kinds[-1] for kinds in map(world.action_kinds, (0, 1))] == ["Aborted", "Aborted"]


def test_a_wish_that_came_too_late_does_not_fall_on_the_next_plan() -> None:
    world = World()
    world.deliver(world.plan(1))
    world.vote()
    world.end_transfers()
    world.launch_vote()
    world.deliver(world.plan(2, term=2), 2)
    world.count_vote()
    assert world.ranks[2].installed.epoch == 1
    world.deliver(world.plan(3), 0, 1)
    world.vote()
    assert world.ranks[0].progress == Progress.OFFERED


def test_a_paused_rank_refuses_plans_and_gives_up_its_own_until_it_is_resumed() -> None:
    world = World()
    world.deliver(world.plan(1))
    world.ranks[1] = world.ranks[1].with_pause("the host sleeps")
    world.vote()
    assert [machine.progress for machine in world.ranks] == [Progress.IDLE] * RANKS
    world.deliver(world.plan(2), 1)
    refusal = world.actions[1][-1]
    assert isinstance(refusal, Refused)
    assert refusal.reason == "balancing is paused on this rank: the host sleeps"
    world.ranks[1] = world.ranks[1].resumed()
    world.deliver(world.plan(3), 1)
    assert world.ranks[1].progress == Progress.OFFERED


def test_a_welcome_of_a_later_term_outdates_the_plans_of_an_earlier_one() -> None:
    world = World()
    world.ranks[0] = world.ranks[0].with_term(7)
    world.deliver(world.plan(1, term=6), 0)
    refusal = world.actions[0][-1]
    assert isinstance(refusal, Refused)
    assert "leader term 6 is older than 7" in refusal.reason


def test_ranks_that_differ_by_tables_alone_serve_no_more() -> None:
    world = World()
    installed = world.ranks[1].installed
    same_RS = installed.placement.phy2log_LRS[0]
    changed = installed.with_layer(0, same_RS, installed.log2phy_LE[0])
    world.ranks[1] = replace(world.ranks[1], installed=changed)
    assert world.ranks[1].installed.digest == installed.digest
    world.launch_vote()
    with pytest.raises(AssertionError):
        world.count_vote()
    assert all(actions[-1] == Diverged("the ranks serve different placements") for actions in world.actions)


EVENTS = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, RANKS - 1), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, RANKS - 1), st.booleans()),
    st.tuples(st.just("launch"), st.just(0), st.just(0)),
    st.tuples(st.just("count"), st.just(0), st.just(0)),
    st.tuples(st.just("steps"), st.just(0), st.integers(1, OFFER_DEADLINE + 1)),
    st.tuples(st.just("halt"), st.integers(0, RANKS - 1), st.just(0)),
)


@given(st.lists(EVENTS, max_size=60))
@settings(max_examples=400, deadline=None)
def test_whatever_happens_all_ranks_serve_one_placement(events: list[tuple[str, int, int]]) -> None:
    world = World()
    plans = {0: world.plan(1, [(0, 1), (1, 2)]), 1: world.plan(2, [(1, 1)])}
    for kind, rank, number in events:
        if kind == "deliver":
            world.deliver(plans.get(number) or world.plan(9 + world.step, [(0, 3)]), rank)
        elif kind == "end":
            world.end_transfer(rank, error="failed" if number else None)
        elif kind == "launch":
            world.launch_vote()
        elif kind == "count":
            world.count_vote()
        elif kind == "steps":
            world.pass_steps(number)
        else:
            world.halt(rank)
        world.check()
