"""Tables that deal: entries in turn, beginning at another replica on each rank, and the same however often repeated."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.placement import (
    Placement,
    PlacementError,
    apply_layers,
    check_log2phy,
    dealt_log2phy,
    dealt_to,
    default_log2phy,
    with_entries,
    without_single_entries,
)

PLACEMENT = Placement.linear(layers=3, experts=6, ranks=4, slots=2)
NEW_RS = np.array([[5, 4], [3, 2], [1, 0], [5, 0]], dtype=np.int32)


def test_each_rank_deals_round_the_replicas_from_one_of_its_own() -> None:
    dealt_RED = dealt_log2phy(NEW_RS, 6, 4)
    # Expert 0 is in slots 5 and 7, expert 5 in 0 and 6; the others have one replica.
    assert dealt_RED[:, 0].tolist() == [[5, 7, 5, 7], [7, 5, 7, 5], [5, 7, 5, 7], [7, 5, 7, 5]]
    assert dealt_RED[3, 5].tolist() == [6, 0, 6, 0]
    assert dealt_RED[2, 4].tolist() == [1, 1, 1, 1]
    check_log2phy(dealt_RED, NEW_RS, deals=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_entry_is_the_engines_rule(seed: int) -> None:
    generator = np.random.default_rng(seed)
    phy2log_RS = np.stack([generator.permutation(6)[:4] for _ in range(7)]).astype(np.int32)
    phy2log_RS[0], phy2log_RS[1] = [0, 1, 2, 3], [2, 3, 4, 5]
    np.testing.assert_array_equal(dealt_log2phy(phy2log_RS, 6, 5)[..., 0], default_log2phy(phy2log_RS, 6))
    placement = Placement(phy2log_RS[None], 6)
    placement.check_log2phy(placement.default_log2phy(3))


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_tokens_dealt_are_those_that_come_by_one_by_one(width: int) -> None:
    for tokens in range(3 * width + 2):
        by_hand_D = np.bincount(np.arange(tokens) % width, minlength=width)
        found_D = [int(dealt_to(np.array(tokens), entry, width)) for entry in range(width)]
        assert found_D == by_hand_D.tolist()


def test_an_axis_of_entries_comes_and_goes() -> None:
    narrow_RLE = PLACEMENT.default_log2phy()
    assert with_entries(narrow_RLE, 3).shape == (4, 3, 6, 1)
    assert without_single_entries(with_entries(narrow_RLE, 3)).shape == narrow_RLE.shape
    wide_RLED = PLACEMENT.default_log2phy(4)
    assert with_entries(wide_RLED, 3).shape == without_single_entries(wide_RLED).shape == (4, 3, 6, 4)


def test_every_entry_is_checked() -> None:
    tables_RLED = PLACEMENT.default_log2phy(3)
    tables_RLED[2, 1, 4, 2] = 3
    with pytest.raises(
        PlacementError, match="layer 1, rank 2: expert 4 points to slot 3, which does not hold"
    ):
        PLACEMENT.check_log2phy(tables_RLED)
    with pytest.raises(PlacementError, match=r"a table has the shape \[experts, entries\]"):
        check_log2phy(np.zeros((6, 0), dtype=np.int32), NEW_RS, deals=True)
    with pytest.raises(PlacementError, match=r"log2phy has the shape \[4, 3, 6\], got \[4, 3\]"):
        PLACEMENT.check_log2phy(tables_RLED[..., 0, 0])


def test_layers_switch_with_their_entries() -> None:
    tables_RLED, new_RED = PLACEMENT.default_log2phy(3), dealt_log2phy(NEW_RS, 6, 3)
    placement, after_RLED = apply_layers(PLACEMENT, tables_RLED, [(1, NEW_RS, new_RED)])
    placement.check_log2phy(after_RLED)
    np.testing.assert_array_equal(after_RLED[:, 1], new_RED)
    np.testing.assert_array_equal(after_RLED[:, [0, 2]], tables_RLED[:, [0, 2]])
    with pytest.raises(
        PlacementError, match=r"log2phy of layer 1 has the shape \[4, 6, 3\], got \[4, 6, 2\]"
    ):
        apply_layers(PLACEMENT, tables_RLED, [(1, NEW_RS, new_RED[..., :2])])
