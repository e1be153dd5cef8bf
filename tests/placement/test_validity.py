"""Tables are refused exactly where some entry names a slot that does not hold its expert."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import Placement, PlacementError, check_log2phy


def slow_flaw(table_GE: np.ndarray, phy2log_RS: np.ndarray) -> tuple[int, int] | None:
    held = phy2log_RS.ravel().tolist()
    for source, table_E in enumerate(table_GE.tolist()):
        for expert, slot in enumerate(table_E):
            if not 0 <= slot < len(held) or held[slot] != expert:
                return source, expert
    return None


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 3), st.data())
def test_tables(seed: int, sources: int, flaws: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    linear = Placement.linear(1, 6, 4, 2)
    phy2log_RS = rng.permutation(6).astype(np.int32)[linear.phy2log_LRS[0]]
    table_GE = Placement(phy2log_RS[None], 6).default_log2phy()[:sources, 0]
    for _ in range(flaws):
        source, expert = data.draw(st.integers(0, sources - 1)), data.draw(st.integers(0, 5))
        table_GE[source, expert] = data.draw(st.integers(-9, 16))
    flaw = slow_flaw(table_GE, phy2log_RS)
    if flaw is None:
        check_log2phy(table_GE, phy2log_RS)
        check_log2phy(table_GE[0], phy2log_RS)
        return
    slot = table_GE[flaw]
    with pytest.raises(
        PlacementError, match=f"here, source {flaw[0]}: expert {flaw[1]} points to slot {slot},"
    ):
        check_log2phy(table_GE, phy2log_RS, "here", source="source")


def test_tables_of_all_ranks_name_rank_and_layer() -> None:
    placement = Placement.linear(3, 6, 4, 2)
    tables_RLE = placement.default_log2phy()
    placement.check_log2phy(tables_RLE)
    tables_RLE[2, 1, 5] = 0
    with pytest.raises(PlacementError, match="log2phy of layer 1, rank 2: expert 5 points to slot 0"):
        placement.check_log2phy(tables_RLE)
    with pytest.raises(PlacementError, match=r"log2phy has the shape \[4, 3, 6\], got \[4, 6\]"):
        placement.check_log2phy(tables_RLE[:, 0])
