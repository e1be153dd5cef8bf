"""The benchmark of time scores by the definition, and judges numbers of slots by the window that follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.time.cells import Cell, cells
from benchmarks.time.heats import CellHeat, recorded
from benchmarks.time.scoring import slowest_us
from benchmarks.time.slot_counts import named
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.placement import Placement
from tests.cost.curves import H200, plain_rank_us


def test_the_scorer_times_each_step_by_the_definition():
    heat_TLE = synthetic_heat("static", 3, 2, 8, tokens=64, top_k=2)
    placement = Placement.linear(2, 8, 4, 3)
    tables_RLE = placement.default_log2phy()
    us_TL = slowest_us(heat_TLE, placement.phy2log_LRS, tables_RLE, H200)
    for step, layer in np.ndindex(us_TL.shape):
        tokens_P = np.zeros(12)
        for source in range(4):
            for expert in range(8):
                tokens_P[tables_RLE[source, layer, expert]] += heat_TLE[step, layer, expert] / 4
        slowest = max(plain_rank_us(H200, tokens.tolist()) for tokens in tokens_P.reshape(4, 3))
        assert us_TL[step, layer] == pytest.approx(slowest)


def test_every_cell_is_measured_and_on_its_window_none_is_slower_than_the_others():
    heat = CellHeat("static", 256, synthetic_heat("static", 96, 1, 32, tokens=256, top_k=4))
    found = list(cells(heat, (8, 64), H200))
    assert [(cell.ranks, cell.slots, cell.more) for cell in found] == [(8, 4, 0), (8, 5, 1), (8, 6, 2)]
    assert all(cell.timed <= cell.better * (1 + 1e-6) for cell in found)


CELL = Cell("static", 64, 8, 4, 0, 9.0, 9.0, 8.0, 9.0, 9.0, 8.0, 8.0, 0.1)


@pytest.mark.parametrize(("next_us", "slots", "right"), [(8.0, 4, True), (7.0, 4, False), (7.95, 4, True)])
def test_the_fewest_slots_are_right_unless_more_are_clearly_faster_afterwards(next_us, slots, right):
    more = replace(CELL, slots=5, more=1, last=next_us)
    (found,) = named([CELL, more])
    assert (found.slots, found.right) == (slots, right)


def test_slots_that_win_nothing_afterwards_were_wrong():
    (found,) = named([CELL, replace(CELL, slots=5, more=1, timed_next=7.0)])
    assert (found.slots, found.wasted, found.right) == (5, 1, False)


def test_recorded_routing_is_drawn_into_steps(tmp_path):
    routes = np.random.default_rng(0).integers(0, 16, (500, 3, 2)).astype(np.uint8)
    np.savez(tmp_path / "routes.npz", routes=routes, num_experts=16)
    heat = recorded(tmp_path / "routes.npz", tokens=32, layers=2, seed=0)
    assert heat.heat_TLE.shape[1:] == (2, 16)
    assert (heat.heat_TLE.sum(axis=2) == 64).all()
