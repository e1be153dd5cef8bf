"""Tests of the tables: they deal tokens to the replicas in turn, and wrong entries are rejected.

The error for a wrong entry names its rank and expert.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import (
    Int32,
    Placement,
    PlacementError,
    check_log2phy,
    dealt_to,
    default_log2phy,
    with_entries,
    without_single_entries,
)
from tests.placement.drawn import placements

PLACEMENT = Placement.linear(layers=3, experts=6, ranks=4, slots=2)


def tables_by_rule(phy2log_RS: Int32, experts: int, width: int) -> list[list[list[int]]]:
    """Return the tables according to the plain rule: entry d of source rank r is replica (r + d) % k."""
    flat = phy2log_RS.ravel().tolist()
    slots_of = [[slot for slot, held in enumerate(flat) if held == expert] for expert in range(experts)]
    return [
        [[slots[(rank + entry) % len(slots)] for entry in range(width)] for slots in slots_of]
        for rank in range(len(phy2log_RS))
    ]


@given(placements(), st.integers(1, 5))
def test_each_rank_deals_to_the_replicas_in_turn_from_its_own_offset(
    placement: Placement, width: int
) -> None:
    tables_RLE = placement.default_log2phy(width)
    placement.check_log2phy(tables_RLE)
    for layer, layer_RS in enumerate(placement.phy2log_LRS):
        table_RE = default_log2phy(layer_RS, placement.experts, width)
        np.testing.assert_array_equal(tables_RLE[:, layer], table_RE)
        assert with_entries(table_RE, 2).tolist() == tables_by_rule(layer_RS, placement.experts, width)
        check_log2phy(table_RE[0], layer_RS, deals=width > 1)


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_dealt_tokens_match_a_token_by_token_count(width: int) -> None:
    for tokens in range(3 * width + 2):
        expected_D = np.bincount(np.arange(tokens) % width, minlength=width)
        tokens_D = [int(dealt_to(np.array(tokens), entry, width)) for entry in range(width)]
        assert tokens_D == expected_D.tolist()


@pytest.mark.parametrize(("width", "entries"), [(1, 1), (4, 4)])
def test_the_entry_axis_is_added_and_removed(width: int, entries: int) -> None:
    tables_RLE = PLACEMENT.default_log2phy(width)
    assert with_entries(tables_RLE, 3).shape == (4, 3, 6, entries)
    assert without_single_entries(with_entries(tables_RLE, 3)).shape == tables_RLE.shape


def slow_flaw(table_GE: np.ndarray, phy2log_RS: np.ndarray) -> tuple[int, int] | None:
    held = phy2log_RS.ravel().tolist()
    for source, table_E in enumerate(table_GE.tolist()):
        for expert, slot in enumerate(table_E):
            if not 0 <= slot < len(held) or held[slot] != expert:
                return source, expert
    return None


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 3), st.data())
def test_the_first_wrong_entry_is_named(seed: int, sources: int, flaws: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    phy2log_RS = rng.permutation(6).astype(np.int32)[PLACEMENT.phy2log_LRS[0]]
    table_GE = default_log2phy(phy2log_RS, 6)[:sources]
    for _ in range(flaws):
        source = data.draw(st.integers(0, sources - 1))
        expert = data.draw(st.integers(0, 5))
        table_GE[source, expert] = data.draw(st.integers(-9, 16))
    flaw = slow_flaw(table_GE, phy2log_RS)
    if flaw is None:
        check_log2phy(table_GE, phy2log_RS)
        return
    message = (
        f"here, rank {flaw[0]}: expert {flaw[1]} points to slot {table_GE[flaw]}, which does not hold it"
    )
    with pytest.raises(PlacementError, match=message):
        check_log2phy(table_GE, phy2log_RS, "here")


@pytest.mark.parametrize("width", [1, 3])
def test_a_wrong_entry_is_reported_with_its_rank_and_layer(width: int) -> None:
    tables_RLE = PLACEMENT.default_log2phy(width)
    with_entries(tables_RLE, 3)[2, 1, 5, -1] = 0
    with pytest.raises(PlacementError, match="log2phy of layer 1, rank 2: expert 5 points to slot 0"):
        PLACEMENT.check_log2phy(tables_RLE)
    with pytest.raises(PlacementError, match=r"expected log2phy of shape \[4, 3, 6\], got \[4, 6"):
        PLACEMENT.check_log2phy(tables_RLE[:, 0])


def test_tables_without_entries_are_rejected() -> None:
    with pytest.raises(PlacementError, match=r"expected a table of shape \[experts, entries\]"):
        check_log2phy(np.zeros((6, 0), dtype=np.int32), PLACEMENT.phy2log_LRS[0], deals=True)
