"""Fakes of the SGLang objects that the adapter uses, with their shapes and types in release 0.5.23."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch

from worker_agent.adapters.sglang.options import SglangOptions

DENSE_LAYERS = 1
MOE_LAYERS = 2
EXPERTS = 6
SLOTS = 4
RANKS = 2
PHYSICAL = SLOTS * RANKS


class Metadata:
    """Fake of ``ExpertLocationMetadata.init_trivial``. On the CPU, the host copies are the tensors themselves."""

    def __init__(self, rank, dispatch):
        layers = DENSE_LAYERS + MOE_LAYERS
        self.physical_to_logical_map = (torch.arange(PHYSICAL) % EXPERTS).repeat(layers, 1)
        self.physical_to_logical_map_cpu = self.physical_to_logical_map.cpu()
        table_EP = torch.full((EXPERTS, PHYSICAL), -1)
        for physical in range(PHYSICAL):
            table_EP[physical % EXPERTS, physical // EXPERTS] = physical
        self.logical_to_all_physical_map = table_EP.repeat(layers, 1, 1)
        self.logical_to_all_physical_map_cpu = self.logical_to_all_physical_map.cpu()
        self.logical_to_all_physical_map_num_valid = (self.logical_to_all_physical_map >= 0).sum(dim=-1)
        dispatch_E = torch.where((table_EP[:, 1] >= 0) & (rank == 1), table_EP[:, 1], table_EP[:, 0])
        self.logical_to_rank_dispatch_physical_map = (
            dispatch_E.repeat(layers, 1) if dispatch == "static" else None
        )
        self.num_logical_experts = EXPERTS
        self.num_physical_experts = PHYSICAL
        self.num_local_physical_experts = SLOTS

    def tensors(self):
        """Return the tensors that a CUDA graph may have captured."""
        tensors = [
            self.physical_to_logical_map,
            self.logical_to_all_physical_map,
            self.logical_to_all_physical_map_num_valid,
            self.logical_to_rank_dispatch_physical_map,
        ]
        return [tensor for tensor in tensors if tensor is not None]

    def to_physical(self, layer_id, ids_TK):
        """Map ids like ``_topk_ids_logical_to_physical_static``, or ``_dynamic`` without an all-to-all backend."""
        if self.logical_to_rank_dispatch_physical_map is not None:
            return self.logical_to_rank_dispatch_physical_map[layer_id][ids_TK]
        row_T1 = torch.arange(ids_TK.shape[0])[:, None]
        entry_TK = row_T1 % self.logical_to_all_physical_map_num_valid[layer_id][ids_TK]
        return self.logical_to_all_physical_map[layer_id][ids_TK, entry_TK]


class Recorder:
    """Fake of ``_ExpertDistributionRecorderReal``. It covers all slots, or this rank's in DeepEP's low-latency mode."""

    def __init__(self, columns=PHYSICAL):
        data = torch.zeros((DENSE_LAYERS + MOE_LAYERS, columns), dtype=torch.int)
        self._single_pass_gatherers = {"primary": SimpleNamespace(_data=data)}
        self.recording = self._record_current_pass = False
        self.data = data

    def start_record(self):
        self.recording = self._record_current_pass = True


class LazyValue:
    """Fake of SGLang's lazy value, which is neither a mapping nor iterable."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        return getattr(self.value, name)

    def __getitem__(self, key):
        return self.value[key]


class Model(torch.nn.Module):
    """Model whose expert weights equal the expert number plus 100 times the layer number.

    One of each layer's two tensors is transposed.
    """

    def __init__(self, rank):
        super().__init__()
        experts_S = (torch.arange(PHYSICAL) % EXPERTS)[rank * SLOTS : (rank + 1) * SLOTS].float()
        weights_by_layer = {}
        for layer_id in range(DENSE_LAYERS, DENSE_LAYERS + MOE_LAYERS):
            values_S11 = (experts_S + 100 * layer_id)[:, None, None]
            w13 = torch.nn.Parameter(values_S11.repeat(1, 3, 2), requires_grad=False)
            w2 = torch.nn.Parameter(values_S11.repeat(1, 5, 4).transpose(1, 2), requires_grad=False)
            setattr(self, f"w13_{layer_id}", w13)
            setattr(self, f"w2_{layer_id}", w2)
            weights_by_layer[layer_id] = [w13.data, w2.data]
        self.routed_experts_weights_of_layer = LazyValue(weights_by_layer)


def runner(rank):
    """Return a fake ``ModelRunner`` with a loaded model."""
    return SimpleNamespace(model=Model(rank), device="cpu", is_draft_worker=False, eplb_manager=None)


class Mode:
    """Fake of ``ForwardMode``."""

    def __init__(self, name):
        self._name = name

    def is_idle(self):
        return self._name == "idle"

    def is_extend(self):
        return self._name in {"extend", "verify", "mixed"}

    def is_mixed(self):
        return self._name == "mixed"

    def is_target_verify(self):
        return self._name == "verify"


def batch(name="decode"):
    """Return a fake ``ForwardBatch`` in this mode."""
    return SimpleNamespace(forward_mode=Mode(name))


def put_modules(monkeypatch, modules):
    """Install importable modules; ``modules`` maps each full name to its attributes."""
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


PLAIN = SglangOptions("dynamic", "none", True, "stat", 8, 8, 1, 1)
