"""Tests of placements: validation, digests, and maps that agree with the slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import Int32, Placement, PlacementError, layer_digest
from tests.placement.drawn import placements


@given(placements())
def test_maps_and_replicas_agree_with_the_slots(placement: Placement) -> None:
    replicas_LE = placement.replicas()
    assert replicas_LE.min() >= 1
    assert (replicas_LE.sum(axis=1) == placement.ranks * placement.slots).all()
    assert replicas_LE.max() <= placement.ranks
    for rank in range(placement.ranks):
        local_LE = placement.expert_map(rank)
        for layer in range(placement.layers):
            slot_of_expert = {
                expert: slot for slot, expert in enumerate(placement.phy2log_LRS[layer, rank].tolist())
            }
            assert {e: s for e, s in enumerate(local_LE[layer].tolist()) if s >= 0} == slot_of_expert


@given(placements(), st.data())
def test_the_digest_distinguishes_placements(placement: Placement, data: st.DataObject) -> None:
    same = Placement(placement.phy2log_LRS.astype(np.int64), placement.experts)
    assert same.digest() == placement.digest()
    assert 0 <= placement.digest() < 2**63
    layer = data.draw(st.integers(0, placement.layers - 1))
    rolled_RS = np.roll(placement.phy2log_LRS[layer], 1, axis=0)
    changed = placement.with_layers([(layer, rolled_RS)])
    equal = np.array_equal(rolled_RS, placement.phy2log_LRS[layer])
    assert (changed.digest() == placement.digest()) == equal


def test_equal_layers_have_different_digests() -> None:
    row_RS = np.zeros((2, 1), dtype=np.int32)
    assert layer_digest(0, row_RS) != layer_digest(1, row_RS)


def test_the_linear_placement_equals_vllms_default() -> None:
    assert Placement.linear(1, 4, 3, 2).phy2log_LRS[0].tolist() == [[0, 1], [2, 3], [0, 1]]


def test_a_placement_is_read_only_and_copies_its_source() -> None:
    source = Placement.linear(1, 4, 3, 2).phy2log_LRS.copy()
    placement = Placement(source, 4)
    source[:] = 0
    assert placement.phy2log_LRS[0, 0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        placement.phy2log_LRS[0, 0, 0] = 3


@pytest.mark.parametrize(
    ("phy2log", "experts", "message"),
    [
        (np.zeros((2, 2), dtype=np.int32), 2, r"shape \[layers, ranks, slots\], got \[2, 2\]"),
        (np.zeros((1, 2, 1), dtype=np.float32), 2, "expected a placement of integers, got float32"),
        (np.array([[[0], [2**40]]]), 2, "outside the int32 range"),
        (np.array([[[0, 1], [2, 5]]]), 4, r"layer 0: rank 1 slot 1 has expert 5; expected 0\.\.3"),
        (np.array([[[0, 1], [0, 1]]]), 3, r"layer 0: expert 2 has no slot \(1 such experts\)"),
        (np.array([[[0, 0], [1, 2]]]), 3, "layer 0: expert 0 appears twice on rank 0"),
        (
            np.array([[[0], [1]]]),
            3,
            "2 ranks x 1 slots = 2 slots cannot hold 3 experts; use at least 2 slots per rank",
        ),
        (np.array([[[0, 1, 0], [1, 0, 1]]]), 2, "3 slots per rank exceed the 2 experts"),
        (np.zeros((1, 0, 1), dtype=np.int32), 1, "must be positive"),
    ],
)
def test_an_invalid_placement_is_rejected_and_the_error_names_the_fault(
    phy2log: Int32, experts: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(phy2log, experts)


def test_a_replaced_layer_is_validated() -> None:
    placement = Placement.linear(3, 4, 3, 2)
    turned_RS = (placement.phy2log_LRS[0] + 1) % 4
    changed = placement.with_layers([(1, turned_RS)])
    assert changed.digest() == Placement(changed.phy2log_LRS, 4).digest() != placement.digest()
    assert not changed.phy2log_LRS.flags.writeable
    with pytest.raises(PlacementError, match="layer 2: expert 3 has no slot"):
        placement.with_layers([(2, np.array([[0, 1], [2, 0], [1, 2]], dtype=np.int32))])
    with pytest.raises(
        PlacementError, match=r"layer 2: expected a placement of shape \[3, 2\], got \[2, 2\]"
    ):
        placement.with_layers([(2, turned_RS[:2])])
