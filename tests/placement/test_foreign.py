"""A placement that another balancer made is a starting point, and its repair is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import (
    Placement,
    PlacementError,
    as_served,
    check_layer,
    checked_foreign,
    repaired,
)
from eplb_service import solve

EXPERTS, RANKS, SLOTS = 12, 4, 4


def drawn_heat(seed: int, steps: int = 32) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.multinomial(4000, generator.dirichlet(np.full(EXPERTS, 0.6)), size=(steps, 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(3, 6))
def test_any_placement_is_repaired_and_keeps_what_can_stay(seed: int, given_slots: int, slots: int) -> None:
    generator = np.random.default_rng(seed)
    raw_LRS = generator.integers(-1, EXPERTS, (2, RANKS, given_slots))
    heat_LE = generator.random((2, EXPERTS))
    found = repaired(raw_LRS.astype(np.int32), EXPERTS, slots, heat_LE)
    for raw_RS, found_RS in zip(raw_LRS, found.phy2log_LRS, strict=True):
        check_layer(found_RS, EXPERTS)
        common = min(given_slots, slots)
        first_RS = np.array(
            [[e >= 0 and e not in row[:s] for s, e in enumerate(row[:common])] for row in raw_RS.tolist()]
        )
        replaced = np.count_nonzero((raw_RS[:, :common] != found_RS[:, :common]) & first_RS)
        missing = EXPERTS - len(set(raw_RS[:, :common][first_RS].tolist()))
        empty = RANKS * slots - np.count_nonzero(first_RS)
        assert replaced <= max(0, missing - empty)


def test_a_legal_placement_stays_as_it_is() -> None:
    linear = Placement.linear(3, EXPERTS, RANKS, SLOTS)
    np.testing.assert_array_equal(
        repaired(linear.phy2log_LRS, EXPERTS, SLOTS).phy2log_LRS, linear.phy2log_LRS
    )


def test_the_hottest_expert_fills_an_empty_slot() -> None:
    raw_LRS = np.array([[[0, 1], [2, -1]]])
    assert repaired(raw_LRS, 3, 2, np.array([[1.0, 5.0, 9.0]])).phy2log_LRS.tolist() == [[[0, 1], [2, 1]]]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([[0, 1]], "has the shape"),
        ([[[0.5, 1.0]]], "holds integers"),
        ([[[0, 9]]], "rank 0 slot 1 names expert 9, not one of 0..2, or -1"),
        ([[[0, -2]]], "names expert -2"),
        ([[[0, 1], [-1, 1]]], "layer 0: expert 2 is in no slot"),
    ],
)
def test_what_is_no_placement_is_rejected(raw: object, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        checked_foreign(raw, 3)


@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
@pytest.mark.parametrize("kind", ["twice", "empty", "fewer slots", "more slots"])
def test_solve_starts_from_any_balancers_placement(kind: str, split: str) -> None:
    heat_TLE = drawn_heat(1)
    start = solve(heat_TLE, RANKS, SLOTS - (kind == "fewer slots") + (kind == "more slots"))
    raw_LRS = start.phy2log
    replicas_E = np.bincount(raw_LRS.ravel(), minlength=EXPERTS)
    spare_RS = replicas_E[raw_LRS[0]] > 1
    spare_RS[:, -1] = False
    rank, slot = next(iter(np.argwhere(spare_RS)), (0, 0))
    if kind == "twice":
        raw_LRS[0, rank, slot] = raw_LRS[0, rank, -1]
    elif kind == "empty":
        raw_LRS[0, rank, slot] = -1
    for price in (0.0, 1000.0):
        found = solve(heat_TLE, RANKS, SLOTS, placement=raw_LRS, split=split, move_price=price)
        check_layer(found.phy2log[0], EXPERTS)
        held_LRS = np.full((1, RANKS, SLOTS), -1)
        common = min(SLOTS, raw_LRS.shape[2])
        held_LRS[:, :, :common] = raw_LRS[:, :, :common]
        assert found.moves == np.count_nonzero(found.phy2log != held_LRS) == found.verdicts[0].moves
        Placement(found.phy2log, EXPERTS).check_log2phy(found.log2phy)
        assert "slots filled" in found.verdicts[0].reason
    if "from scratch" in found.verdicts[0].reason:
        return
    # If moves cost much, only the slots that had to be filled receive an expert.
    least = repaired(raw_LRS, EXPERTS, SLOTS, heat_TLE.sum(axis=0))
    assert found.moves == np.count_nonzero(least.phy2log_LRS != held_LRS) > 0


def test_what_served_before_is_scored_with_its_duplicates() -> None:
    # Rank 0 holds expert 0 twice: it receives all of its tokens.
    raw_LRS, heat_TLE = np.array([[[0, 0], [1, 2]]]), np.full((8, 1, 3), 30)
    heat_TLE[..., 0] = 120
    served = as_served(raw_LRS.astype(np.int32), 3)
    assert served is not None
    assert served.phy2log_LRS.tolist() == raw_LRS.tolist()
    for split in ("tables", "even", "step"):
        found = solve(heat_TLE, 2, 2, placement=raw_LRS, split=split, move_price=0.0)
        assert found.par_before == pytest.approx(120 / 90)
        assert found.par_after < found.par_before


def test_tables_of_layers_that_need_no_repair_stay() -> None:
    legal_RS = Placement.linear(1, EXPERTS, RANKS, SLOTS).phy2log_LRS[0]
    raw_LRS = np.stack([legal_RS, legal_RS])
    raw_LRS[1, 3] = [8, 9, 8, 11]
    raw_LRS[1, 2] = [10, 9, 10, 4]
    tables_RLE = np.stack([Placement(legal_RS[None], EXPERTS).default_log2phy()[:, 0]] * 2, axis=1)
    tables_RLE[:, 1, 8], tables_RLE[:, 1, 9], tables_RLE[:, 1, 10] = 12, 9, 8
    tables_RLE[:, 1, 11], tables_RLE[:, 1, 4], tables_RLE[:, 1, 0:4] = 15, 11, [0, 1, 2, 3]
    heat_TLE = np.repeat(drawn_heat(2), 2, axis=1)
    found = solve(
        heat_TLE, RANKS, SLOTS, placement=raw_LRS, log2phy=tables_RLE, move_price=1000.0, min_gain=9.0
    )
    np.testing.assert_array_equal(found.log2phy[:, 0], tables_RLE[:, 0])
    assert found.moves_L[0] == 0 < found.moves_L[1]
