"""Where tokens come from is summed by rank, and what slots received follows from it and the tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.heat.window import Window
from eplb_service.placement import dealt_log2phy, without_single_entries
from tests.heat.reports import (
    EXPERTS,
    LAYERS,
    PLACEMENT_LRS,
    RANKS,
    SLOTS,
    assembler,
    loads_of,
    report,
    sources_only,
)


def test_sources_are_summed_where_all_ranks_report_the_same_steps() -> None:
    heat = assembler(window_steps=8)
    heat.add(0, report(0, 1, 1))
    assert Window(*heat.remembered().arrays()).steps == 0
    heat.add(1, report(0, 5, 5))
    heat.add(0, report(2, 7))  # rank 1 has not reported this bucket yet
    window = Window(*heat.remembered().arrays())
    assert window.source_RLE is not None
    np.testing.assert_array_equal(window.source_RLE[:, 0, 0], [2, 10])


def test_sums_over_reports_are_as_good_as_counts_by_step() -> None:
    rng = np.random.default_rng(0)
    by_step, by_report = (
        assembler(window_steps=16, pending_steps=8),
        assembler(window_steps=16, pending_steps=8),
    )
    for first_step in range(0, 32, 4):
        for rank in range(RANKS):
            sent = report(first_step, *rng.integers(0, 9, 4))
            summed = replace(
                sent,
                source_counts_TLE=None,
                source_sums_LE=sent.source_counts_TLE.sum(axis=0, dtype=np.int32),
            )
            by_step.add(rank, sent)
            by_report.add(rank, summed)
    expected_RLE, found_RLE = by_step.remembered().sources.total(), by_report.remembered().sources.total()
    assert expected_RLE.sum() > 0
    np.testing.assert_array_equal(found_RLE, expected_RLE)


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 4), width=st.sampled_from((1, 3)))
def test_what_slots_received_follows_from_sources_and_tables(seed: int, steps: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    heat = assembler()
    counts_RTLE = rng.integers(0, 50, (RANKS, steps, LAYERS, EXPERTS)).astype(np.uint8)
    tables_LRED = np.stack([dealt_log2phy(rows, EXPERTS, width) for rows in PLACEMENT_LRS])
    loads_TLR = np.zeros((steps, LAYERS, RANKS))
    for rank, step, layer, expert in np.ndindex(*counts_RTLE.shape):
        for token in range(counts_RTLE[rank, step, layer, expert]):
            target = tables_LRED[layer, rank, expert, token % width] // SLOTS
            loads_TLR[step, layer, target] += 1
    for layer, rows in enumerate(PLACEMENT_LRS):
        heat.placements.place(layer, 0, rows, without_single_entries(tables_LRED[layer]))
    for rank in range(RANKS):
        heat.add(rank, sources_only(0, counts_RTLE[rank]))
    heat_TLE, source_RLE = heat.remembered().arrays()
    np.testing.assert_array_equal(heat_TLE, counts_RTLE.sum(axis=0))
    np.testing.assert_array_equal(loads_of(heat, (0, 0)), loads_TLR)
    assert source_RLE is not None


def test_tokens_went_where_the_table_of_their_epoch_sent_them() -> None:
    heat = assembler()
    elsewhere_RE = np.array([[2, 1, 3], [0, 3, 2]], dtype=np.int32)
    heat.placements.place(0, 1, np.array([[0, 1], [2, 1]], dtype=np.int32), elsewhere_RE)
    counts_TLE = np.ones((1, LAYERS, EXPERTS), dtype=np.int32)
    for rank in range(RANKS):
        heat.add(rank, sources_only(0, counts_TLE, epochs=(1, 0)))
    # Rank 0 sends experts 0 and 2 away and keeps 1; rank 1 sends 0 away and keeps the others.
    np.testing.assert_array_equal(loads_of(heat, (1, 0))[0, 0], [2, 4])


def test_a_step_that_only_some_ranks_count_by_slot_is_lost() -> None:
    heat = assembler(pending_steps=2)
    heat.add(0, report(0, 1))
    assert heat.add(1, sources_only(0, np.ones((1, LAYERS, EXPERTS), dtype=np.int32))).received == 0
    for rank in range(RANKS):
        heat.add(rank, report(1, 1, 1))
    assert heat.counted == (2, 1)
