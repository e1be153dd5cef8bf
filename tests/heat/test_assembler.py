"""Only steps that every rank reported under the same placement enter the window.

Their counts are interpreted with that placement.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.heat.assembler import HeatAssembler, memory_bytes
from eplb_core.heat.phase import StepPhase
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.placement import Placement, default_log2phy, mean_par, par, with_entries
from eplb_core.wire.agent import Shape
from eplb_core.wire.heat import HeatReport

RANKS = 2
LAYERS = 2
EXPERTS = 3
SLOTS = 2
PLACEMENT_LRS = np.array([[[0, 1], [2, 0]], [[2, 1], [0, 1]]], dtype=np.int32)


def assembler(window_steps: int = 8, pending_steps: int = 4, *groups: int, **shape: Any) -> HeatAssembler:
    groups_R = np.array(groups or range(RANKS), dtype=np.int32)
    heat = HeatAssembler(
        Shape(RANKS, LAYERS, EXPERTS, SLOTS, 0, **shape), window_steps, pending_steps, groups_R
    )
    for layer in range(LAYERS):
        place(heat, layer, 0, PLACEMENT_LRS[layer])
    return heat


def place(heat: HeatAssembler, layer: int, epoch: int, phy2log_RS: np.ndarray) -> None:
    heat.placements.place(layer, epoch, phy2log_RS, default_log2phy(phy2log_RS, EXPERTS))


def loads_of(heat: HeatAssembler) -> np.ndarray:
    """Return the rank loads of the window's steps, ``[T, L, R]``, as differences between sums over the newest steps."""
    sums = [heat.load_sums(newest)[1] for newest in range(1, heat.steps + 1)]
    return np.diff([np.zeros((LAYERS, RANKS)), *sums], axis=0)[::-1]


def window_of(heat: HeatAssembler) -> Window:
    return Window(*heat.remembered().arrays())


def add(heat: HeatAssembler, rank: int, sent: HeatReport) -> int:
    """Add one rank's report, assemble the steps that it completes, and return their number."""
    received = heat.take(rank, sent).received
    heat.assemble_steps()
    return received


def add_all(heat: HeatAssembler, sent: HeatReport) -> None:
    """Add the same report for every rank."""
    for rank in range(RANKS):
        add(heat, rank, sent)


def report(
    first_step: int, *counts: int, epochs: tuple[int, ...] = (0, 0), dummy: bool = False
) -> HeatReport:
    """Return a report of ``counts[t]`` tokens in each slot of each layer in step ``t``."""
    counts_T11 = np.array(counts, dtype=np.int32)[:, None, None]
    slots, sources = (np.tile(counts_T11, (1, LAYERS, cells)) for cells in (SLOTS, EXPERTS))
    phase_T = np.full(len(counts), StepPhase.DUMMY if dummy else StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first_step, epochs, slots, phase_T, sources)


def sources_only(first_step: int, counts_TLE: np.ndarray, epochs: tuple[int, ...] = (0, 0)) -> HeatReport:
    phase_T = np.full(len(counts_TLE), StepPhase.DECODE, dtype=np.uint8)
    return HeatReport(first_step, epochs, None, phase_T, counts_TLE)


def test_a_step_enters_the_window_when_all_ranks_have_reported_it() -> None:
    heat = assembler()
    assert add(heat, 0, report(10, 1, 2)) == 0
    assert window_of(heat).steps == 0
    assert add(heat, 1, report(10, 10, 20)) == 2
    window = window_of(heat)
    # Layer 0: expert 0 is on both ranks, 1 on rank 0, 2 on rank 1. Layer 1: 1 on both ranks, 2 on rank 0, 0 on rank 1.
    np.testing.assert_array_equal(window.heat_TLE, [[[11, 1, 10], [10, 11, 1]], [[22, 2, 20], [20, 22, 2]]])
    np.testing.assert_array_equal(loads_of(heat)[:, 0], [[2, 20], [4, 40]])
    assert heat.counted == (2, 0)


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        ([report(0, 1), report(2, 1, 1)], 1),
        ([report(0, 1), report(2, 1, 1, epochs=(1, 0))], 3),
        ([report(0, 1), report(1, 1, epochs=(1, 0)), report(2, 1, 1)], 1),
        ([report(0, 1), report(1, 1, epochs=(7, 0)), report(2, 1, 1)], 1),
        ([report(0, 1), sources_only(1, np.ones((1, LAYERS, EXPERTS), dtype=np.int32)), report(2, 1, 1)], 1),
        ([report(2, 1, 1), report(0, 1, 1)], 0),
        ([report(0, 1, 1, 1, 1)], 0),
        ([report(0, 1, 1, 1, 1), report(500, 1)], 0),
    ],
    ids=[
        "skipped",
        "never",
        "different placement",
        "unknown epoch",
        "not by slot",
        "late",
        "all",
        "jump ahead",
    ],
)
def test_steps_without_matching_reports_from_all_ranks_are_lost(reports: list[HeatReport], lost: int) -> None:
    heat = assembler(pending_steps=4)
    place(heat, 0, 1, PLACEMENT_LRS[0])
    add(heat, 0, report(0, 1, 1, 1, 1))
    for sent in reports:
        add(heat, 1, sent)
    add_all(heat, report(4, 1))
    assert heat.counted.lost == lost
    assert heat.steps == heat.counted.received
    numbers = heat.served_steps().step_T
    assert heat.counted.received == len(set(numbers))


def test_a_step_is_empty_if_the_counting_ranks_were_busy_but_counted_nothing() -> None:
    # Both ranks see the same tokens. The first rank counts them for both and may be idle.
    heat = assembler(8, 4, 0, 0)
    for step, (idle, tokens, empty) in enumerate([(False, 0, 1), (True, 0, 1), (False, 0, 2), (True, 1, 0)]):
        add(heat, 0, report(step, tokens, dummy=idle))
        add(heat, 1, report(step, 0))
        assert (heat.pending.empty_steps, heat.steps) == (empty, step + 1)


def test_a_report_is_ahead_if_it_would_push_out_steps_of_slower_ranks() -> None:
    heat = assembler(pending_steps=4)
    pending = heat.pending
    assert not pending.is_ahead(0, report(100, 1))
    add(heat, 0, report(100, 1, 1))
    assert not pending.is_ahead(0, report(102, 1, 1))
    # A fifth pending step would push out step 100, which rank 1 has not reported.
    assert pending.is_ahead(0, report(104, 1))
    add(heat, 1, report(100, 1))
    assert not pending.is_ahead(0, report(104, 1))
    assert pending.is_ahead(0, report(104, 1, 1))
    # After a jump ahead, the slower rank could not catch up anyway.
    assert not pending.is_ahead(0, report(107, 1))
    # A rank that lost some of its own steps does not wait for the slower ranks.
    assert not pending.is_ahead(1, report(105, 1))
    assert pending.slowest == (1, 101)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("far", [20, 1000, (1 << 48) - 4])
def test_reports_with_wrong_step_numbers_do_not_stop_the_assembly(ranks: int, far: int) -> None:
    heat = HeatAssembler(Shape(ranks, LAYERS, EXPERTS, SLOTS, 0), 8, 4)
    for layer in range(LAYERS):
        slots_RS = PLACEMENT_LRS[layer, :ranks].copy()
        heat.placements.place(layer, 0, slots_RS, np.zeros((ranks, EXPERTS), dtype=np.int32))
    for rank in range(ranks):
        add(heat, rank, report(0, 1, 1))
    received = heat.counted.received
    for _ in range(6):
        far += 4
        add(heat, 0, report(far, 1, 1))
    if ranks > 1:
        assert heat.counted.received == received
        assert heat.counted.lost <= 6 * 4, (
            "steps that one rank jumps over are lost only if the other ranks follow"
        )
    before = heat.counted.received
    for step in range(2, 18, 2):
        for rank in range(ranks):
            add(heat, rank, report(step, 3, 3))
    assert heat.counted.received >= before + 14
    _, sources = heat.remembered().arrays()
    assert sources is not None
    lost = heat.counted.lost
    assert lost < (1 << 50)
    for rank in range(ranks):
        add(heat, rank, report(30, 3))
    assert heat.counted.lost == lost + 12, "lost steps are counted from the ranks' current step again"


def test_memory_stays_within_its_bound() -> None:
    shape = Shape(64, 16, 256, 5, 1)
    bound = memory_bytes(shape, window_steps=32, pending_steps=16)
    placement = Placement.linear(shape.layers, shape.experts, shape.ranks, shape.slots)
    tables_RLE = placement.default_log2phy()
    tracemalloc.start()
    heat = HeatAssembler(shape, 32, 16)
    sources = np.ones((4, shape.layers, shape.experts), dtype=np.int32)
    slots = np.ones((4, shape.layers, shape.slots), dtype=np.int32)
    for epoch in range(10):
        for layer in range(shape.layers):
            phy2log_RS = placement.phy2log_LRS[layer].copy()
            table_RE = tables_RLE[:, layer].copy()
            heat.placements.place(layer, epoch, phy2log_RS, table_RE)
        for rank in range(shape.ranks):
            phases = np.full(4, StepPhase.DECODE, dtype=np.uint8)
            add(heat, rank, HeatReport(4 * epoch, (epoch,) * shape.layers, slots, phases, sources))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert heat.steps == 32
    assert 0.3 * bound < used < bound


def test_a_late_or_repeated_report_changes_nothing() -> None:
    heat = assembler(pending_steps=2)
    for first_step in (0, 2):
        add_all(heat, report(first_step, 1, 1))
    before_TLE, _ = heat.remembered().arrays()
    assert add(heat, 0, report(0, 9, 9)) == 0
    assert add(heat, 1, report(2, 9, 9)) == 0
    after_TLE, _ = heat.remembered().arrays()
    np.testing.assert_array_equal(before_TLE, after_TLE)
    assert heat.counted.lost == 0


def test_counts_are_interpreted_with_the_placement_of_their_epoch() -> None:
    heat = assembler()
    switched_RS = np.array([[2, 1], [0, 1]], dtype=np.int32)
    place(heat, 0, 1, switched_RS)
    for rank in range(RANKS):
        add(heat, rank, report(0, 1))
        add(heat, rank, report(1, 1, epochs=(1, 0)))
    window = window_of(heat)
    np.testing.assert_array_equal(window.heat_TLE[:, 0], [[2, 1, 1], [1, 2, 1]])
    # A switch does not change the loads of earlier steps.
    np.testing.assert_array_equal(loads_of(heat).sum(axis=2), [[4, 4], [4, 4]])


def test_steps_that_are_dummies_on_all_ranks_add_no_heat() -> None:
    heat = assembler()
    add_all(heat, report(0, 0, dummy=True))
    assert window_of(heat).steps == 0
    assert heat.counted == (1, 0)
    add(heat, 0, report(1, 0, dummy=True))
    assert add(heat, 1, report(1, 3)) == 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_step_is_counted_twice_or_invented_whatever_the_order_of_reports(data: st.DataObject) -> None:
    """Each rank reports ``t + 1`` tokens per slot in step ``t``, in batches of random size, loss and delay."""
    heat = assembler(window_steps=64, pending_steps=6)
    at = [0] * RANKS
    for _ in range(data.draw(st.integers(1, 40))):
        rank = data.draw(st.integers(0, RANKS - 1))
        size = data.draw(st.integers(1, 6))
        if data.draw(st.booleans()):
            add(heat, rank, report(at[rank], *range(at[rank] + 1, at[rank] + size + 1)))
        at[rank] += size
    window = window_of(heat)
    assert heat.counted.received + heat.counted.lost <= max(at)
    steps = window.heat_TLE[:, 0, 1] - 1
    assert (np.diff(steps) > 0).all()
    np.testing.assert_array_equal(window.heat_TLE[:, 0, 0], 2 * (steps + 1))


def test_steps_enter_the_window_in_batches_and_are_all_added_before_the_next_report() -> None:
    heat = assembler(pending_steps=4)
    for rank in range(RANKS):
        heat.take(rank, report(0, 1, 2, 3))
    heat.assemble_steps(1)
    assert (heat.steps, heat.waiting) == (1, 2)
    heat.take(0, report(3, 4))
    assert (heat.steps, heat.waiting) == (3, 0)
    np.testing.assert_array_equal(window_of(heat).heat_TLE[:, 0, 1], [1, 2, 3])


@given(seed=st.integers(0, 2**32 - 1), reports=st.integers(0, 12))
def test_the_stored_par_follows_from_the_loads(seed: int, reports: int) -> None:
    rng = np.random.default_rng(seed)
    heat = assembler()
    epoch = 0
    for number in range(reports):
        if rng.random() < 0.2:
            epoch += 1
            place(heat, 0, epoch, PLACEMENT_LRS[0])
        for rank in range(RANKS):
            counts = rng.integers(0, 4, 2).tolist()
            add(heat, rank, report(2 * number, *counts, epochs=(epoch, 0)))
    loads_TLR = loads_of(heat)
    np.testing.assert_allclose(mean_par(heat.served_par(heat.steps), axis=0), par(loads_TLR))
    served = heat.served_steps()
    np.testing.assert_array_equal(served.tokens_T, loads_TLR.sum(axis=(1, 2)))
    np.testing.assert_array_equal(served.slowest_T, loads_TLR.max(axis=2).sum(axis=1))


def test_the_window_slides_and_snapshots_do_not_change() -> None:
    heat = assembler(window_steps=2, pending_steps=4)
    add_all(heat, report(0, 1, 2))
    remembered = heat.remembered()
    before_TLE, before_RLE = (array.copy() for array in remembered.arrays())
    for step in range(2, 20):
        add_all(heat, report(step, step))
    np.testing.assert_array_equal(remembered.arrays()[0], before_TLE)
    np.testing.assert_array_equal(remembered.arrays()[1], before_RLE)
    np.testing.assert_array_equal(window_of(heat).heat_TLE[:, 0, 1], [18, 19])


def test_source_heat_is_available_once_all_ranks_report_it_by_step_or_as_sums() -> None:
    heat = assembler(window_steps=8)
    add(heat, 0, report(0, 1, 1))
    assert window_of(heat).source_RLE is None
    summed = np.full((LAYERS, EXPERTS), 10, dtype=np.int32)
    add(heat, 1, replace(report(0, 5, 5), source_counts_TLE=None, source_sums_LE=summed))
    add(heat, 0, report(2, 1))  # Rank 1 has not reported this step yet.
    np.testing.assert_allclose(window_of(heat).source_RLE[:, 0, 0], [1, 5], rtol=1e-6)
    for step in range(3, 83):
        add(heat, 0, report(step, 9))
    np.testing.assert_allclose(window_of(heat).source_RLE[:, 0, 0], [9, 5], rtol=1e-3)


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 4), width=st.sampled_from((1, 3)))
def test_loads_follow_from_source_heat_and_tables(seed: int, steps: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    heat = assembler()
    counts_RTLE = rng.integers(0, 50, (RANKS, steps, LAYERS, EXPERTS)).astype(np.uint8)
    tables_LRE = np.stack([default_log2phy(rows, EXPERTS, width) for rows in PLACEMENT_LRS])
    loads_TLR = np.zeros((steps, LAYERS, RANKS))
    for rank, step, layer, expert in np.ndindex(*counts_RTLE.shape):
        for token in range(counts_RTLE[rank, step, layer, expert]):
            target = with_entries(tables_LRE, 3)[layer, rank, expert, token % width] // SLOTS
            loads_TLR[step, layer, target] += 1
    for layer, rows in enumerate(PLACEMENT_LRS):
        heat.placements.place(layer, 0, rows, tables_LRE[layer])
    for rank in range(RANKS):
        add(heat, rank, sources_only(0, counts_RTLE[rank]))
    heat_TLE, source_RLE = heat.remembered().arrays()
    np.testing.assert_array_equal(heat_TLE, counts_RTLE.sum(axis=0))
    np.testing.assert_array_equal(loads_of(heat), loads_TLR)
    assert source_RLE is not None


def par_of_layer_0_by_row(*counts_RE: list[int]) -> float:
    """Return the mean PAR of layer 0 if ranks that pick entries by row send these tokens in each step."""
    steps = 1000
    heat = assembler(steps, steps, width=2, entry_by_row=True)
    for layer, phy2log_RS in enumerate(PLACEMENT_LRS):
        heat.placements.place(layer, 0, phy2log_RS, default_log2phy(phy2log_RS, EXPERTS, 2))
    for rank, counts_E in enumerate(counts_RE):
        counts_TLE = np.tile(np.array(counts_E, dtype=np.int32), (steps, LAYERS, 1))
        add(heat, rank, sources_only(0, counts_TLE))
    return float(heat.served_par(steps)[:, 0].mean())


def test_the_tokens_of_a_host_that_picks_entries_by_row_fall_on_random_replicas() -> None:
    # One of four steps sends all three tokens of expert 0 to one rank, which then has 4 of the 5 tokens.
    expected = 1.6 / 4 + 1.2 * 3 / 4
    assert par_of_layer_0_by_row([3, 1, 1], [0, 0, 0]) == pytest.approx(expected, abs=0.02)


def test_ranks_with_the_same_counts_pick_replicas_independently() -> None:
    # Each rank sends one token of expert 0 to either rank. Half of the steps send both to the same rank.
    assert par_of_layer_0_by_row([1, 0, 0], [1, 0, 0]) == pytest.approx(1.5, abs=0.06)


def test_tokens_are_attributed_to_ranks_with_the_tables_of_their_epoch() -> None:
    heat = assembler()
    table_RE = np.array([[2, 1, 3], [0, 3, 2]], dtype=np.int32)
    heat.placements.place(0, 1, np.array([[0, 1], [2, 1]], dtype=np.int32), table_RE)
    counts_TLE = np.ones((1, LAYERS, EXPERTS), dtype=np.int32)
    add_all(heat, sources_only(0, counts_TLE, epochs=(1, 0)))
    # Rank 0 sends the tokens of experts 0 and 2 to rank 1. Rank 1 sends the tokens of expert 0 to rank 0.
    np.testing.assert_array_equal(loads_of(heat)[0, 0], [2, 4])


def test_a_wait_for_requests_does_not_count_as_a_step() -> None:
    times = StepTimes(np.array([1000.0, np.nan, 1100.0, 900_000.0, 1200.0]), np.array([8.0, 8, 10, 2, 12]))
    assert times.served_T.tolist() == [True, False, True, False, True]
    assert times.mean_us == pytest.approx(1100)
    assert times.tokens_per_step == pytest.approx(10)
    assert times.newest(1).mean_us == 1200
    unknown = StepTimes(np.full(3, np.nan), np.full(3, np.nan))
    assert (unknown.mean_us, unknown.tokens_per_step) == (None, None)


def test_shared_tokens_are_counted_once_and_are_unknown_for_old_agents() -> None:
    ranks = 4
    layers = 1
    experts = 8
    slots = 2
    placement = Placement.linear(layers, experts, ranks, slots)
    groups_R = np.array([0, 0, 1, 1], dtype=np.int32)
    heat = HeatAssembler(Shape(ranks, layers, experts, slots, 0), 8, 4, groups_R)
    heat.placements.place(0, 0, placement.phy2log_LRS[0], placement.default_log2phy()[:, 0])
    counts_TLS = np.ones((2, layers, slots), dtype=np.int32)
    phase_T = np.full(2, StepPhase.DECODE, dtype=np.uint8)
    for rank in range(ranks):
        tokens_T = np.array([5 + rank // 2] * 2)
        micros_T = np.array([0, 1000 + rank])
        add(heat, rank, HeatReport(0, (0,), counts_TLS, phase_T, tokens_T=tokens_T, micros_T=micros_T))
    for rank in range(ranks):
        add(heat, rank, HeatReport(2, (0,), counts_TLS, phase_T))
    times = heat.step_times((0,))
    np.testing.assert_array_equal(times.us_T, [np.nan, 1001.5, np.nan, np.nan])
    np.testing.assert_array_equal(times.tokens_T, [11, 11, np.nan, np.nan])
    assert np.isnan(heat.step_times((1,)).us_T).all(), (
        "steps under a different placement say nothing about the current one"
    )


PREFILL, DECODE, DUMMY, MIXED = map(int, StepPhase)


@pytest.mark.parametrize(
    ("phase", "entered", "own_RT", "other_phase_steps"),
    [
        ("all", [1, 2, 3, 4], ([1, 2, 3, 4, 0], [1, 2, 3, 4, 0]), 0),
        ("prefill", [1, 3], ([1], [3]), 1),
        ("decode", [2, 4], ([2, 3, 4], [1, 2]), 0),
    ],
)
def test_only_steps_of_the_planned_phase_enter_the_window(phase, entered, own_RT, other_phase_steps):
    """Steps 1 and 3 prefill on one rank, step 3 in a mixed batch. Steps 2 and 4 do not prefill, and step 5 is a dummy.

    A rank's own tokens count for the rank's own phase.
    """
    heat = HeatAssembler(Shape(RANKS, LAYERS, EXPERTS, SLOTS, 0), 8, 8, phase=phase)
    for layer in range(LAYERS):
        place(heat, layer, 0, PLACEMENT_LRS[layer])
    phases_RT = [[PREFILL, DECODE, DECODE, DECODE, DUMMY], [DECODE, DECODE, MIXED, DUMMY, DUMMY]]
    for rank, phases in enumerate(phases_RT):
        sent = replace(report(1, 1, 2, 3, 4, 0), phase_T=np.array(phases, dtype=np.uint8))
        add(heat, rank, sent)
    assert heat.served_steps().step_T.tolist() == entered
    assert heat.counted.received == 5
    rates_RLE = heat.remembered().arrays()[1]
    assert rates_RLE is not None
    np.testing.assert_allclose(rates_RLE[:, 0, 0], [np.mean(own_T) for own_T in own_RT])
    assert heat.other_phase_steps == other_phase_steps


def test_a_reports_sums_count_only_if_all_its_steps_are_in_the_planned_phase():
    heat = HeatAssembler(Shape(RANKS, LAYERS, EXPERTS, SLOTS, 0), 8, 8, phase="decode")
    for layer in range(LAYERS):
        place(heat, layer, 0, PLACEMENT_LRS[layer])
    sums_LE = np.full((LAYERS, EXPERTS), 6, dtype=np.int32)
    for first, phases in ((0, [DECODE, PREFILL]), (2, [DECODE, DECODE])):
        sent = replace(report(first, 1, 2), source_counts_TLE=None, source_sums_LE=sums_LE)
        add_all(heat, replace(sent, phase_T=np.array(phases, dtype=np.uint8)))
    rates_RLE = heat.remembered().arrays()[1]
    assert rates_RLE is not None
    np.testing.assert_allclose(rates_RLE[:, 0, 0], [3, 3])


def test_tokens_in_slots_outside_all_tables_are_reported() -> None:
    heat = assembler()
    tables_RE = default_log2phy(PLACEMENT_LRS[0], EXPERTS)
    # Expert 0 is in slot 0 of rank 0 and slot 1 of rank 1. The tables send all its tokens to rank 0.
    tables_RE[:, 0] = 0
    heat.placements.place(0, 1, PLACEMENT_LRS[0], tables_RE)
    add_all(heat, report(0, 3, 3))
    assert heat.misrouted_steps == 0
    add_all(heat, report(2, 3, 0, 3, epochs=(1, 0)))
    assert heat.misrouted_steps == 2
    assert heat.misrouted == (1, 0, 1)
    add_all(heat, report(5, 3))
    assert heat.misrouted_steps == 0
