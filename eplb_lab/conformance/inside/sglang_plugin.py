"""Plugin for SGLang: the kit's orders replace the algorithm of SGLang's own EPLB, which moves the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eplb_lab.conformance.inside.orders import CONTROL, FOLDER, TABLE, Orders, left_behind

_TABLES = (
    "logical_to_all_physical_map",
    "logical_to_all_physical_map_num_valid",
    "logical_to_rank_dispatch_physical_map",
)


def register() -> None:
    """Install the plugin if the kit started this process. SGLang calls this in each process."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    orders = Orders(Path(folder))

    def decide(original: Any, *arguments: Any, **named: Any) -> Any:
        return _ordered(orders, original, *arguments, **named)

    HookRegistry.register("sglang.srt.eplb.eplb_algorithms.rebalance_experts", decide, HookType.AROUND)
    if os.environ.get(CONTROL):
        update = "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update"
        HookRegistry.register(update, _faulty_update, HookType.AROUND)


def _ordered(orders: Orders, original: Any, *arguments: Any, **named: Any) -> Any:
    """Return the ordered placement, or the current one, with its tables."""
    import torch
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None:  # the initial placement
        return original(*arguments, **named)
    group = get_world_group()

    def send(box: list[Any]) -> None:
        torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)

    placement = orders.decide(metadata.physical_to_logical_map_cpu.tolist(), group.rank_in_group, send)
    slots = [_slots_of_experts(row, metadata.num_logical_experts) for row in placement]
    counts = [[len(replicas) for replicas in row] for row in slots]
    width = max(map(max, counts))
    padded = [[replicas + [-1] * (width - len(replicas)) for replicas in row] for row in slots]
    return torch.tensor(placement), torch.tensor(padded), torch.tensor(counts)


def _slots_of_experts(row: list[int], experts: int) -> list[list[int]]:
    slots: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(row):
        slots[expert].append(slot)
    return slots


def _faulty_update(original: Any, updater: Any, weights_of_layer: Any, *arguments: Any, **named: Any) -> Any:
    """Leave something of the first MoE layer behind if a move changes the expert in the first slot of this rank."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    layer = min(weights_of_layer.keys())  # SGLang's LazyValue cannot be iterated over
    tensor = left_behind()
    behind = [weights_of_layer[layer][tensor][0]] if tensor is not None else []
    keeps_table = os.environ[CONTROL] == TABLE
    if keeps_table:
        tables = (getattr(metadata, name) for name in _TABLES)
        behind = [table[layer] for table in tables if table is not None]
    first = named["rank"] * weights_of_layer[layer][0].shape[0]
    before = int(metadata.physical_to_logical_map[layer, first])
    saved = [part.clone() for part in behind]
    result = original(updater, weights_of_layer, *arguments, **named)
    # Every rearrangement writes all tables, even if nothing moves, so a table must be restored each time.
    if keeps_table or int(metadata.physical_to_logical_map[layer, first]) != before:
        for part, old in zip(behind, saved, strict=True):
            part.copy_(old)
    return result
