"""SGLang's own objects as far as the adapter touches them, in the shapes and types that release 0.5.23 gives them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch

from worker_agent.adapters.sglang.options import SglangOptions

DENSE_LAYERS, MOE_LAYERS, EXPERTS, SLOTS, RANKS = 1, 2, 6, 4, 2
PHYSICAL = SLOTS * RANKS


class Metadata:
    """``ExpertLocationMetadata.init_trivial``; on CPU the host's copies are the tensors themselves."""

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
        own_E = torch.where((table_EP[:, 1] >= 0) & (rank == 1), table_EP[:, 1], table_EP[:, 0])
        self.logical_to_rank_dispatch_physical_map = own_E.repeat(layers, 1) if dispatch == "static" else None
        self.num_logical_experts, self.num_physical_experts = EXPERTS, PHYSICAL
        self.num_local_physical_experts = SLOTS

    def tensors(self):
        """Those that graphs may have captured."""
        found = [
            self.physical_to_logical_map,
            self.logical_to_all_physical_map,
            self.logical_to_all_physical_map_num_valid,
            self.logical_to_rank_dispatch_physical_map,
        ]
        return [tensor for tensor in found if tensor is not None]

    def to_physical(self, layer_id, ids_TK):
        """``_topk_ids_logical_to_physical_static`` and ``_dynamic``, the latter without an all-to-all."""
        if self.logical_to_rank_dispatch_physical_map is not None:
            return self.logical_to_rank_dispatch_physical_map[layer_id][ids_TK]
        row_T1 = torch.arange(ids_TK.shape[0])[:, None]
        entry_TK = row_T1 % self.logical_to_all_physical_map_num_valid[layer_id][ids_TK]
        return self.logical_to_all_physical_map[layer_id][ids_TK, entry_TK]


class Recorder:
    """``_ExpertDistributionRecorderReal``: counts all slots, or this rank's (DeepEP, low latency)."""

    def __init__(self, columns=PHYSICAL):
        data = torch.zeros((DENSE_LAYERS + MOE_LAYERS, columns), dtype=torch.int)
        self._single_pass_gatherers = {"primary": SimpleNamespace(_data=data)}
        self.recording = self._record_current_pass = False
        self.data = data

    def start_record(self):
        self.recording = self._record_current_pass = True


class LazyValue:
    """SGLang's: neither a mapping nor iterable."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        return getattr(self.value, name)

    def __getitem__(self, key):
        return self.value[key]


class Model(torch.nn.Module):
    """Experts filled with their number plus 100 for each layer; one of two tensors is kept transposed."""

    def __init__(self, rank):
        super().__init__()
        held_S = (torch.arange(PHYSICAL) % EXPERTS)[rank * SLOTS : (rank + 1) * SLOTS].float()
        found = {}
        for layer_id in range(DENSE_LAYERS, DENSE_LAYERS + MOE_LAYERS):
            whole = (held_S + 100 * layer_id)[:, None, None]
            plain = torch.nn.Parameter(whole.repeat(1, 3, 2), requires_grad=False)
            turned = torch.nn.Parameter(whole.repeat(1, 5, 4).transpose(1, 2), requires_grad=False)
            setattr(self, f"w13_{layer_id}", plain)
            setattr(self, f"w2_{layer_id}", turned)
            found[layer_id] = [plain.data, turned.data]
        self.routed_experts_weights_of_layer = LazyValue(found)


def runner(rank):
    """``ModelRunner`` with the model loaded."""
    return SimpleNamespace(model=Model(rank), device="cpu", is_draft_worker=False, eplb_manager=None)


class Mode:
    """``ForwardMode``."""

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
    """``ForwardBatch``."""
    return SimpleNamespace(forward_mode=Mode(name))


def put_modules(monkeypatch, named):
    """Modules that can be imported by these names, with what is in each."""
    for name, contents in named.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


PLAIN = SglangOptions("dynamic", "none", True, "stat", 8, 8, 1, 1)
