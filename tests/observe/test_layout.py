"""Layouts of observed engines, and their loads as a service computes them from a valid placement."""

import numpy as np
import pytest

from eplb_core.placement import Placement, PlacementError, with_entries
from worker_agent.observe.layout import ObservedLayout, linear, moved


def loads(layout, heat_E, rank=0):
    """Return the load of each rank in layer 0 according to the reported tables of one rank."""
    reported = layout.rank(rank)
    table_ED = with_entries(reported.log2phy_LE, 2)[0]
    rank_ED = table_ED // reported.placement.slots
    load_R = np.zeros(reported.placement.ranks)
    np.add.at(load_R, rank_ED, np.broadcast_to(heat_E[:, None] / table_ED.shape[1], rank_ED.shape))
    return load_R


@pytest.mark.parametrize(
    ("phy2log_RS", "expected"),
    [
        ([[0, 1], [2, 3]], [30, 70]),
        ([[0, 1, 3], [2, 3, 0]], [45, 55]),  # experts 0 and 3 have two replicas each
        ([[3, 3, 1], [2, 3, 0]], [20 + 2 / 3 * 40, 10 + 30 + 1 / 3 * 40]),  # expert 3 is twice on rank 0
        ([[0, 1, 2], [3, -1, -1]], [60, 40]),  # rank 1 has empty slots
    ],
)
def test_rank_loads_follow_the_placement_that_the_engine_serves(phy2log_RS, expected):
    layout = ObservedLayout(np.array([phy2log_RS], dtype=np.int32), experts=4)
    heat_E = np.array([10.0, 20.0, 30.0, 40.0])
    assert loads(layout, heat_E) == pytest.approx(expected)
    assert heat_E @ layout.shares_LER[0] == pytest.approx(expected)
    # The reported placement is always valid.
    assert isinstance(layout.rank(1).placement, Placement)


def test_a_ranks_own_table_is_reported_if_it_uses_one_replica_per_expert():
    phy2log_LRS = np.array([[[0, 1, 0], [2, 3, 0]]], dtype=np.int32)
    table_LE = np.array([[2, 1, 3, 4]], dtype=np.int32)
    layout = ObservedLayout(phy2log_LRS, 4, table_LE)
    # Slot 2 of rank 0 holds a second replica of expert 0, so the expert's first slot is reported instead.
    assert layout.rank(0).log2phy_LE.tolist() == [[0, 1, 3, 4]]
    assert loads(layout, np.array([10.0, 20.0, 30.0, 40.0])).tolist() == [30, 70]


@pytest.mark.parametrize(("redundant", "width"), [(0, 1), (1, 2), (2, 6), (3, 12), (9, 12)])
def test_the_table_width_depends_only_on_the_shape(redundant, width):
    slots = np.arange(9 + redundant + (9 + redundant) % 2) % 9
    layout = ObservedLayout(slots.reshape(1, 2, -1).astype(np.int32), 9)
    expected = {1: 1, 2: 2, 3: 6}.get(slots.size - 8, 12)
    assert layout.width == expected
    assert with_entries(layout.rank(0).log2phy_LE, 2).shape[-1] == layout.width
    assert width <= layout.width


def test_a_layout_in_which_an_expert_has_no_slot_is_rejected():
    with pytest.raises(PlacementError, match="expert 3 has no slot"):
        ObservedLayout(np.array([[[0, 1], [2, 0]]], dtype=np.int32), 4)


def test_ranks_that_notice_changes_at_different_times_report_the_same_epochs():
    first_LRS = linear(3, 4, 2)
    second_LRS = first_LRS.copy()
    second_LRS[0] = [[1, 0], [2, 3]]
    last_LRS = second_LRS.copy()
    last_LRS[2] = [[0, 2], [1, 3]]
    first, second, last = (
        ObservedLayout(phy2log_LRS, 4) for phy2log_LRS in (first_LRS, second_LRS, last_LRS)
    )
    stepwise = moved(moved(first.rank(0), second), last)
    at_once = moved(first.rank(1), last)
    assert stepwise.epoch == at_once.epoch == 2
    assert stepwise.layer_epochs == at_once.layer_epochs == (1, 0, 2)
    assert stepwise.digest == at_once.digest == last.rank(0).digest
    assert moved(at_once, last).epoch == 2


def test_an_uneven_division_of_experts_leaves_slots_empty():
    layout = ObservedLayout(linear(2, 5, 3), 5)
    assert layout.phy2log_LRS[1].tolist() == [[0, 1], [2, 3], [4, -1]]
    assert loads(layout, np.ones(5)) == pytest.approx([2, 2, 1])
