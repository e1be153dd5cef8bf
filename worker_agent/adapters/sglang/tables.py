"""SGLang's ``ExpertLocationMetadata``, written in place: graphs have captured its tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eplb_service.placement import Int32, Placement, even_log2phy, with_entries
from worker_agent.device import on_host


class LocationTables:
    """The rows that belong to the layers that are balanced; a model's dense layers have rows as well.

    Static dispatch reads ``logical_to_rank_dispatch_physical_map``, one replica per expert. Dynamic dispatch takes the
    first ``logical_to_all_physical_map_num_valid`` columns of ``logical_to_all_physical_map`` in turn: of them the
    agent makes a dealing table. The copies on the host always name all replicas: weights are loaded by them.

    Parameters
    ----------
    metadata
        SGLang's.
    layer_ids
        Which of its rows the agent's layers are, in their order.
    entries
        D of the tables; 1 under static dispatch.
    source_rank
        Whose tables these are at first, in the group of ranks that share tokens the first of them.
    """

    def __init__(self, metadata: Any, layer_ids: list[int], entries: int, source_rank: int) -> None:
        self._metadata = metadata
        self._rows = layer_ids
        self._deals = metadata.logical_to_rank_dispatch_physical_map is None
        self._entries = entries
        experts = int(metadata.num_logical_experts)
        placed_LP = metadata.physical_to_logical_map_cpu[layer_ids].numpy().astype(np.int32)
        slots = int(metadata.num_local_physical_experts)
        self.first = Placement(placed_LP.reshape(len(layer_ids), -1, slots), experts)
        # On CPU the copies are the tensors themselves, which dynamic dispatch reads.
        metadata.logical_to_all_physical_map_cpu = metadata.logical_to_all_physical_map_cpu.clone()
        for index in range(len(layer_ids)):
            self.follow(index, self.first.phy2log_LRS[index])
        if self._deals:
            self._deal(even_log2phy(self.first, entries)[source_rank])

    def _deal(self, log2phy_LE: Int32) -> None:
        table_LED = torch.from_numpy(with_entries(log2phy_LE, 2).astype(np.int64))
        for index, table_ED in enumerate(table_LED):
            row = self._rows[index]
            self._metadata.logical_to_all_physical_map[row, :, : self._entries].copy_(table_ED)
            self._metadata.logical_to_all_physical_map_num_valid[row].fill_(self._entries)

    def log2phy(self, index: int) -> torch.Tensor:
        """The table that sends this rank's tokens of a layer, ``[E]`` or ``[E, D]``, as a view."""
        row = self._rows[index]
        table: torch.Tensor
        if self._deals:
            table = self._metadata.logical_to_all_physical_map[row, :, : self._entries]
        else:
            table = self._metadata.logical_to_rank_dispatch_physical_map[row]
        return table

    def follow(self, index: int, phy2log_RS: Int32) -> None:
        """Keep SGLang's view of the placement true for a layer that has just switched; its table is the agent's."""
        metadata, row = self._metadata, self._rows[index]
        held_P = torch.from_numpy(phy2log_RS.reshape(-1).astype(np.int64))
        replicas_EP, counts_E = _replicas(phy2log_RS, self.first.experts)
        _write(metadata.physical_to_logical_map[row], held_P)
        metadata.physical_to_logical_map_cpu[row].copy_(held_P)
        metadata.logical_to_all_physical_map_cpu[row].copy_(replicas_EP)
        if not self._deals:
            _write(metadata.logical_to_all_physical_map[row], replicas_EP)
            _write(metadata.logical_to_all_physical_map_num_valid[row], counts_E)


def _write(table: torch.Tensor, values: torch.Tensor) -> None:
    """In place, without waiting for the device."""
    table.copy_(on_host(values, table.device), non_blocking=True)


def _replicas(phy2log_RS: Int32, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical ids of each expert, int64 ``[E, R*S]`` filled up with -1, and how many there are, int64 ``[E]``."""
    flat_P = phy2log_RS.reshape(-1)
    by_expert_P = np.argsort(flat_P, kind="stable")
    counts_E = np.bincount(flat_P, minlength=experts)
    first_E = np.cumsum(counts_E) - counts_E
    sorted_P = flat_P[by_expert_P]
    replicas_EP = np.full((experts, flat_P.size), -1, dtype=np.int64)
    replicas_EP[sorted_P, np.arange(flat_P.size) - first_E[sorted_P]] = by_expert_P
    return torch.from_numpy(replicas_EP), torch.from_numpy(counts_E.astype(np.int64))
