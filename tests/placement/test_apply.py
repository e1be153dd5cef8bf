"""Tests of applying a plan: only its layers change, and the original arrays stay unmodified."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.placement import Placement, PlacementError, apply_layers, default_log2phy

PLACEMENT = Placement.linear(layers=3, experts=6, ranks=4, slots=2)
TABLES_RLE = PLACEMENT.default_log2phy()
NEW_RS = np.array([[5, 4], [3, 2], [1, 0], [5, 0]], dtype=np.int32)
NEW_RE = default_log2phy(NEW_RS, 6)


@pytest.mark.parametrize("width", [1, 3])
def test_only_the_layers_of_the_plan_change(width: int) -> None:
    old_RLE = PLACEMENT.default_log2phy(width)
    new_RE = default_log2phy(NEW_RS, 6, width)
    placement, tables_RLE = apply_layers(PLACEMENT, old_RLE, [(1, NEW_RS, new_RE)])
    expected_LRS = PLACEMENT.phy2log_LRS.copy()
    expected_RLE = PLACEMENT.default_log2phy(width)
    expected_LRS[1] = NEW_RS
    expected_RLE[:, 1] = new_RE
    np.testing.assert_array_equal(placement.phy2log_LRS, expected_LRS)
    np.testing.assert_array_equal(tables_RLE, expected_RLE)
    placement.check_log2phy(tables_RLE)
    np.testing.assert_array_equal(PLACEMENT.phy2log_LRS, Placement.linear(3, 6, 4, 2).phy2log_LRS)
    np.testing.assert_array_equal(old_RLE, PLACEMENT.default_log2phy(width))


def test_the_tables_of_one_rank_change_like_those_of_the_group() -> None:
    rank_RE = NEW_RE[2:3]
    _, rank_RLE = apply_layers(PLACEMENT, TABLES_RLE[2:3], [(1, NEW_RS, rank_RE), (0, NEW_RS, rank_RE)])
    _, tables_RLE = apply_layers(PLACEMENT, TABLES_RLE, [(1, NEW_RS, NEW_RE), (0, NEW_RS, NEW_RE)])
    np.testing.assert_array_equal(rank_RLE[0], tables_RLE[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((1, np.zeros((4, 2), dtype=np.int32), NEW_RE), "layer 1: expert 1 has no slot"),
        ((1, NEW_RS, NEW_RE + 1), "log2phy of layer 1, rank 0: expert 0 points to slot 6"),
        ((1, NEW_RS, NEW_RE[0]), r"log2phy of layer 1: expected tables of shape \[4, 6\], got \[6\]"),
        ((1, NEW_RS[:2], NEW_RE), r"layer 1: expected a placement of shape \[4, 2\]"),
    ],
)
def test_an_invalid_layer_is_rejected(change: tuple, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        apply_layers(PLACEMENT, TABLES_RLE, [change])


def test_tables_of_the_wrong_width_are_rejected() -> None:
    change = 1, NEW_RS, default_log2phy(NEW_RS, 6, 2)
    with pytest.raises(
        PlacementError, match=r"layer 1: expected tables of shape \[4, 6, 3\], got \[4, 6, 2\]"
    ):
        apply_layers(PLACEMENT, PLACEMENT.default_log2phy(3), [change])
