"""Tests of the plugin for SGLang, with stand-ins for the modules of SGLang that it imports."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from eplb_lab.conformance.inside import sglang_plugin
from eplb_lab.conformance.inside.orders import CONTROL, Orders, order_file, write_json

PLACEMENT = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
LOCATION = "sglang.srt.eplb.expert_location"
GROUPS = "sglang.srt.distributed.parallel_state"


class LazyWeights:
    """Like SGLang's ``LazyValue``: it has the methods of a dictionary, but is iterated by index."""

    def __init__(self, weights):
        self._weights = weights

    def __getitem__(self, layer):
        return self._weights[layer]

    def keys(self):
        return self._weights.keys()


@pytest.fixture
def metadata(monkeypatch):
    tables = SimpleNamespace(
        physical_to_logical_map=PLACEMENT.clone(),
        physical_to_logical_map_cpu=PLACEMENT.clone(),
        num_logical_experts=3,
        logical_to_all_physical_map=torch.zeros(2, 3, 4),
        logical_to_all_physical_map_num_valid=torch.zeros(2, 3),
        logical_to_rank_dispatch_physical_map=None,
    )
    group = SimpleNamespace(ranks=[0], rank_in_group=0, cpu_group=None)
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.distributed", LOCATION, GROUPS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[LOCATION].get_global_expert_location_metadata = lambda: tables
    sys.modules[GROUPS].get_world_group = lambda: group
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    return tables


def test_an_ordered_placement_is_returned_with_its_tables(metadata, tmp_path):
    write_json(tmp_path / order_file(1), [[0, 0, 1, 2], [0, 1, 2, 1]])
    placement, slots, counts = sglang_plugin._ordered(Orders(tmp_path), None)
    assert placement.tolist() == [[0, 0, 1, 2], [0, 1, 2, 1]]
    assert slots.tolist() == [[[0, 1], [2, -1], [3, -1]], [[0, -1], [1, 3], [2, -1]]]
    assert counts.tolist() == [[2, 1, 1], [1, 2, 1]]


@pytest.mark.parametrize(("control", "tensor"), [("weight", 0), ("last-weight", 1), ("table", None)])
def test_a_control_leaves_only_its_tensor_behind(control, tensor, metadata, monkeypatch):
    monkeypatch.setenv(CONTROL, control)
    weights = {layer: [torch.zeros(2, 3), torch.zeros(2, 5)] for layer in (0, 1)}

    def update(_updater, weights_of_layer, rank):
        for layer in weights_of_layer.keys():  # noqa: SIM118
            for part in weights_of_layer[layer]:
                part.fill_(1)
        metadata.logical_to_all_physical_map.fill_(1)
        metadata.physical_to_logical_map[:, 2] += 1

    sglang_plugin._faulty_update(update, None, LazyWeights(weights), rank=1)
    stale_weights = {
        (layer, index)
        for layer, parts in weights.items()
        for index, part in enumerate(parts)
        if (part[0] == 0).all()
    }
    assert stale_weights == (set() if tensor is None else {(0, tensor)})
    assert all((part[1] == 1).all() for parts in weights.values() for part in parts)
    stale = [bool((table == 0).all()) for table in metadata.logical_to_all_physical_map]
    assert stale == [control == "table", False]
