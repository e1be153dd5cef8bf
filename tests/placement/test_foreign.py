"""Tests of placements from other balancers: their repair, and decisions that start from them."""

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

EXPERTS = 12
RANKS = 4
SLOTS = 4


def drawn_heat(seed: int, steps: int = 32) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.multinomial(4000, generator.dirichlet(np.full(EXPERTS, 0.6)), size=(steps, 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(3, 6))
def test_a_repair_replaces_as_few_slots_as_possible(seed: int, raw_slots: int, slots: int) -> None:
    generator = np.random.default_rng(seed)
    raw_LRS = generator.integers(-1, EXPERTS, (2, RANKS, raw_slots))
    heat_LE = generator.random((2, EXPERTS))
    placement = repaired(raw_LRS.astype(np.int32), EXPERTS, slots, heat_LE)
    for raw_RS, repaired_RS in zip(raw_LRS, placement.phy2log_LRS, strict=True):
        check_layer(repaired_RS, EXPERTS)
        common = min(raw_slots, slots)
        first_RS = np.array(
            [[e >= 0 and e not in row[:s] for s, e in enumerate(row[:common])] for row in raw_RS.tolist()]
        )
        replaced = np.count_nonzero((raw_RS[:, :common] != repaired_RS[:, :common]) & first_RS)
        missing = EXPERTS - len(set(raw_RS[:, :common][first_RS].tolist()))
        empty = RANKS * slots - np.count_nonzero(first_RS)
        assert replaced <= max(0, missing - empty)


def test_a_valid_placement_is_unchanged() -> None:
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
        ([[0, 1]], "expected a placement of shape"),
        ([[[0.5, 1.0]]], "expected a placement of integers"),
        ([[[0, 9]]], "rank 0 slot 1 has expert 9; expected 0..2, or -1"),
        ([[[0, -2]]], "has expert -2"),
        ([[[0, 1], [-1, 1]]], "layer 0: expert 2 has no slot"),
    ],
)
def test_an_array_that_is_not_a_placement_is_rejected(raw: object, message: str) -> None:
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
        solution = solve(heat_TLE, RANKS, SLOTS, placement=raw_LRS, split=split, move_price=price)
        check_layer(solution.phy2log[0], EXPERTS)
        held_LRS = np.full((1, RANKS, SLOTS), -1)
        common = min(SLOTS, raw_LRS.shape[2])
        held_LRS[:, :, :common] = raw_LRS[:, :, :common]
        assert solution.moves == np.count_nonzero(solution.phy2log != held_LRS) == solution.verdicts[0].moves
        Placement(solution.phy2log, EXPERTS).check_log2phy(solution.log2phy)
        assert "slots filled" in solution.verdicts[0].reason
    if "from scratch" in solution.verdicts[0].reason:
        return
    # If moves are expensive, only the slots that must be filled receive an expert.
    repair = repaired(raw_LRS, EXPERTS, SLOTS, heat_TLE.sum(axis=0))
    assert solution.moves == np.count_nonzero(repair.phy2log_LRS != held_LRS) > 0


def test_the_old_placement_is_scored_with_its_duplicates() -> None:
    # Rank 0 holds expert 0 twice, so it receives all of the expert's tokens.
    raw_LRS = np.array([[[0, 0], [1, 2]]])
    heat_TLE = np.full((8, 1, 3), 30)
    heat_TLE[..., 0] = 120
    served = as_served(raw_LRS.astype(np.int32), 3)
    assert served is not None
    assert served.phy2log_LRS.tolist() == raw_LRS.tolist()
    for split in ("tables", "even", "step"):
        solution = solve(heat_TLE, 2, 2, placement=raw_LRS, split=split, move_price=0.0)
        assert solution.par_before == pytest.approx(120 / 90)
        assert solution.par_after < solution.par_before


def test_valid_layers_keep_their_tables() -> None:
    legal_RS = Placement.linear(1, EXPERTS, RANKS, SLOTS).phy2log_LRS[0]
    raw_LRS = np.stack([legal_RS, legal_RS])
    raw_LRS[1, 3] = [8, 9, 8, 11]
    raw_LRS[1, 2] = [10, 9, 10, 4]
    tables_RLE = np.stack([Placement(legal_RS[None], EXPERTS).default_log2phy()[:, 0]] * 2, axis=1)
    tables_RLE[:, 1, 8] = 12
    tables_RLE[:, 1, 9] = 9
    tables_RLE[:, 1, 10] = 8
    tables_RLE[:, 1, 11] = 15
    tables_RLE[:, 1, 4] = 11
    tables_RLE[:, 1, 0:4] = [0, 1, 2, 3]
    heat_TLE = np.repeat(drawn_heat(2), 2, axis=1)
    solution = solve(
        heat_TLE, RANKS, SLOTS, placement=raw_LRS, log2phy=tables_RLE, move_price=1000.0, min_gain=9.0
    )
    np.testing.assert_array_equal(solution.log2phy[:, 0], tables_RLE[:, 0])
    assert solution.moves_L[0] == 0 < solution.moves_L[1]
