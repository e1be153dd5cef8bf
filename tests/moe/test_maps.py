"""Every expert must be on exactly one rank, the ranks differ by at most one expert, and all tables must agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import PlacementError, check_layer
from tests.moe.cases import Case
from worker_agent.moe.maps import (
    ExpertSpread,
    SpreadStrategy,
    initial_phy2log,
    replica_table,
    usable_strategy,
)


@st.composite
def spreads(draw: st.DrawFn) -> ExpertSpread:
    ranks = draw(st.integers(1, 9))
    return ExpertSpread(draw(st.integers(ranks, 40)), ranks, draw(st.sampled_from(SpreadStrategy)))


@given(spreads())
@settings(deadline=None)
def test_the_tables_agree(spread: ExpertSpread):
    slots_R = [spread.slots(rank) for rank in range(spread.ranks)]
    assert sum(slots_R) == spread.experts
    assert slots_R == sorted(slots_R, reverse=True)
    assert slots_R[0] - slots_R[-1] <= 1
    physical = 0
    for rank, slots in enumerate(slots_R):
        expert_map_E = spread.expert_map(rank)
        for slot, expert in enumerate(spread.local_to_global(rank)):
            assert expert_map_E[expert] == slot
            assert spread.global_to_physical()[expert] == physical
            assert spread.physical_to_global()[physical] == expert
            physical += 1
        assert (expert_map_E >= 0).sum() == spread.expert_mask(rank).sum() == slots
        np.testing.assert_array_equal(spread.expert_mask(rank) == 1, expert_map_E != -1)


def test_linear_is_contiguous_and_round_robin_strided():
    linear = ExpertSpread(7, 3)
    assert [linear.local_to_global(rank).tolist() for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    strided = ExpertSpread(7, 3, SpreadStrategy.ROUND_ROBIN)
    assert [strided.local_to_global(rank).tolist() for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert strided.global_to_physical().tolist() == [0, 3, 5, 1, 4, 6, 2]


def test_a_placement_needs_an_even_spread():
    strided = ExpertSpread(6, 3, SpreadStrategy.ROUND_ROBIN)
    assert strided.phy2log().tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(PlacementError, match=r"7 experts do not divide evenly over 3 ranks.*add 2 redundant"):
        ExpertSpread(7, 3).phy2log()


@pytest.mark.parametrize(("experts", "ranks"), [(3, 4), (3, 0)])
def test_no_rank_stays_empty(experts: int, ranks: int):
    with pytest.raises(PlacementError, match=f"{experts} experts cannot be spread over {ranks} ranks"):
        ExpertSpread(experts, ranks)


def test_a_rank_that_is_not_there():
    with pytest.raises(PlacementError, match="there is no rank 3 among 3"):
        ExpertSpread(7, 3).local_to_global(3)


def test_round_robin_falls_back_with_a_warning():
    round_robin = SpreadStrategy.ROUND_ROBIN
    assert usable_strategy(round_robin, expert_groups=4, redundant=0) is round_robin
    with pytest.warns(UserWarning, match="round_robin cannot be used with redundant experts"):
        assert usable_strategy(round_robin, expert_groups=4, redundant=2) is SpreadStrategy.LINEAR
    with pytest.warns(UserWarning, match="round_robin cannot be used with no expert groups"):
        assert usable_strategy(round_robin, expert_groups=1, redundant=0) is SpreadStrategy.LINEAR


def test_redundant_experts_come_last():
    assert initial_phy2log(6, 4, redundant=2).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    strided = initial_phy2log(8, 4, strategy=SpreadStrategy.ROUND_ROBIN, expert_groups=2)
    assert strided.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(PlacementError, match=r"6 experts and 1 redundant.*use 2 redundant experts"):
        initial_phy2log(6, 4, redundant=1)
    with pytest.raises(PlacementError, match="zero or more, got -1"):
        initial_phy2log(6, 4, redundant=-1)


@given(st.integers(1, 6), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_initial_placements_are_valid_for_every_size_of_group(ranks: int, slots: int, data: st.DataObject):
    experts = data.draw(st.integers(slots, ranks * slots))
    phy2log_RS = initial_phy2log(experts, ranks, ranks * slots - experts)
    assert phy2log_RS.shape == (ranks, slots)
    check_layer(phy2log_RS, experts)


@given(ranks=st.integers(1, 4), slots=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
@settings(deadline=None)
def test_every_slot_is_listed_once(ranks: int, slots: int, seed: int, data: st.DataObject):
    experts = data.draw(st.integers(slots, ranks * slots))
    phy2log_RS = Case("all2allv", experts, slots, 1, (0,) * ranks, seed=seed).placement()
    table = replica_table(phy2log_RS, experts)
    for expert, row in enumerate(table.log2phys_EC.tolist()):
        replicas = np.flatnonzero(phy2log_RS.ravel() == expert).tolist()
        assert row == replicas + [-1] * (len(row) - len(replicas))
        assert table.counts_E[expert] == len(replicas)
    assert table.log2phys_EC.shape[1] == table.counts_E.max()


def test_columns_may_be_fixed_for_graphs():
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    assert replica_table(phy2log_RS, 3, columns=3).log2phys_EC.tolist() == [
        [0, 2, -1],
        [1, -1, -1],
        [3, -1, -1],
    ]
    with pytest.raises(ValueError, match="an expert has 2 replicas, which do not fit 1 columns"):
        replica_table(phy2log_RS, 3, columns=1)
    with pytest.raises(PlacementError, match="expert 3 is in no slot"):
        replica_table(phy2log_RS, 4)
