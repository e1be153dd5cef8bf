"""The table check detects device tables that differ from the installed layout, and checks the layers in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_core.placement import Placement
from worker_agent.swap import table_check
from worker_agent.swap.rank_layout import RankLayout
from worker_agent.swap.table_check import TableCheck

PLACEMENT = Placement.linear(3, 6, 2, 4)
RANK = 1
ROUND = table_check._ROUND_BOUNDARIES + 1


def initial_layers(width: int) -> tuple[list[Any], RankLayout]:
    """Return layers whose tables match the installed layout, and that layout."""
    tables_LE = PLACEMENT.default_log2phy(width)[RANK]
    maps_LE = PLACEMENT.expert_map(RANK)
    pairs = [map(torch.tensor, pair) for pair in zip(maps_LE, tables_LE, strict=True)]
    layers = [SimpleNamespace(expert_map=map_E, log2phy=table_E) for map_E, table_E in pairs]
    return layers, RankLayout.first(RANK, PLACEMENT, tables_LE)


@pytest.mark.parametrize("table", ["expert_map", "log2phy"])
@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("width", [1, 4])
def test_a_changed_entry_is_detected_within_a_round(table: str, layer: int, width: int) -> None:
    layers, installed = initial_layers(width)
    check = TableCheck(layers)
    assert not any(check.at_boundary(step, installed) for step in range(ROUND))
    getattr(layers[layer], table)[4] += 1
    (complaint,) = {check.at_boundary(step, installed) for step in range(ROUND)} - {None}
    assert f"layer {layer}: {table} of expert 4 is" in complaint


def test_all_layers_of_a_large_model_are_compared_within_256_passes() -> None:
    placement = Placement.linear(58, 6, 2, 4)
    tables_LE = placement.default_log2phy(1)[RANK]
    maps_LE = placement.expert_map(RANK)
    pairs = [map(torch.tensor, pair) for pair in zip(maps_LE, tables_LE, strict=True)]
    layers = [SimpleNamespace(expert_map=map_E, log2phy=table_E) for map_E, table_E in pairs]
    check = TableCheck(layers)
    installed = RankLayout.first(RANK, placement, tables_LE)
    layers[0].log2phy[4] += 1  # This layer is compared last.
    complaints = [check.at_boundary(step, installed) for step in range(257)]
    assert any(complaints)


def test_a_copied_table_is_compared_with_the_layout_at_the_time_of_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, before = initial_layers(1)
    mark = SimpleNamespace(passed=lambda: False)
    monkeypatch.setattr(table_check, "Mark", lambda _: mark)
    check = TableCheck(layers)
    assert not any(check.at_boundary(step, before) for step in range(ROUND))
    after = before.with_layer(1, PLACEMENT.phy2log_LRS[1], PLACEMENT.default_log2phy()[0, 1])
    layers[1].log2phy.copy_(torch.from_numpy(after.log2phy_LE[1]))
    mark.passed = lambda: True
    assert check.at_boundary(99, after) is None


@pytest.mark.parametrize("table", ["expert_map", "log2phy"])
def test_a_table_is_compared_before_a_commit_overwrites_it(table: str) -> None:
    layers, before = initial_layers(1)
    check = TableCheck(layers)
    getattr(layers[2], table)[4] += 1
    check.before_commit(2, 7, before)
    after = before.with_layer(2, PLACEMENT.phy2log_LRS[2], PLACEMENT.default_log2phy()[0, 2])
    layers[2].expert_map.copy_(torch.from_numpy(PLACEMENT.expert_map(RANK)[2]))
    layers[2].log2phy.copy_(torch.from_numpy(after.log2phy_LE[2]))
    complaint = check.at_boundary(8, after)
    assert complaint is not None
    assert f"layer 2: {table} of expert 4 is" in complaint
    assert "at step 7" in complaint
    assert not any(check.at_boundary(step, after) for step in range(ROUND))
