"""Fake vLLM-Ascend layers, with counters, weights and dispatch."""

import types

import torch

EXPERTS = 6
SLOTS = 4


class HostLayer(torch.nn.Module):
    """Layer with the counters of a vLLM-Ascend layer, updated as in the real one."""

    def __init__(self, policy):
        super().__init__()
        self.local_num_experts = SLOTS
        self.dynamic_eplb = True
        self.log2phy = torch.arange(EXPERTS, dtype=torch.int32)
        self.load_counter = None  # release 0.30 always has the attribute
        if policy == 3:
            self.moe_load = torch.zeros(5, SLOTS, dtype=torch.int32)
            self.load_counter = torch.tensor(0, dtype=torch.int32)
        else:
            self.moe_load = torch.zeros(SLOTS, dtype=torch.int64)

    def receive(self, counts):
        if self.moe_load.dim() == 1:
            self.moe_load.add_(torch.tensor(counts))
            return
        row = torch.remainder(self.load_counter, len(self.moe_load)).reshape(1)
        self.moe_load.index_add_(0, row, torch.tensor([counts], dtype=torch.int32))
        self.load_counter.add_(1)

    def clear_moe_load(self):
        self.moe_load.zero_()


def weighted(kind, **tensors):
    layer = HostLayer(1)
    layer.quant_type = types.SimpleNamespace(name=kind)
    for name, tensor in tensors.items():
        setattr(layer, name, tensor)
    return layer


LISTS = ("w13_weight_list", "w2_weight_list", "w13_weight_scale_fp32_list", "w2_weight_scale_list")


def per_expert(*shape):
    return torch.nn.Parameter(torch.zeros(SLOTS, *shape))


SCALES = [torch.ones(2) for _ in range(SLOTS)]


def dispatch(layer, ids, mask=None, physical=False):
    """Return the input of ``fused_experts`` in release 0.23, or in 0.30 if the choices are physical experts."""
    routing = types.SimpleNamespace(mc2_mask=mask)
    if physical:
        return types.SimpleNamespace(topk_ids=torch.tensor(ids), routing=routing, layer=layer)
    routing.log2phy = layer.log2phy
    return types.SimpleNamespace(topk_ids=torch.tensor(ids), routing=routing)
