"""What balancing reads of a layer and writes into it: maps and heat, all on the device."""

from __future__ import annotations

from enum import Enum

import torch

from eplb_service.placement import Int32
from eplb_service.wire.heat import StepPhase
from worker_agent.moe.maps import RankPlacement, replica_table
from worker_agent.moe.operators import count_ids


class HeatStage(str, Enum):
    """The steps whose heat counts. The others get a row of zeros, so that step ``n`` stays in row ``n % W``.

    A dummy step of one rank has no tokens of its own, but slots that others' tokens come to: it counts where all
    steps do. For one stage alone, give an idle rank the phase of the others, and mark none of its tokens active.
    """

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"

    def records(self, phase: StepPhase) -> bool:
        """Whether a step of this phase counts."""
        return self is HeatStage.ALL or self.name == phase.name


class EplbState(torch.nn.Module):
    """One layer's maps and heat on one rank; all are tensors that keep their addresses."""

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, -1 where this rank has none."""

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id that this rank's tokens of each expert go to; ``[E, D]`` where they go to several in
    turn."""

    logical_to_physical_map: torch.Tensor
    """int32 ``[E, C]``: the physical ids of all replicas of each expert in order, -1 behind them; C is the most that
    any placement of so many slots can have. ``install_placement`` keeps it true."""

    logical_replica_count: torch.Tensor
    """int32 ``[E]``: how many replicas each expert has."""

    moe_load: torch.Tensor
    """int32 ``[W, S]``: token choices that each slot worked on, from all ranks."""

    source_load: torch.Tensor | None
    """int32 ``[W, E]``: choices of the tokens that this rank passed to ``forward``, by logical expert.

    Each token counts on one rank under every dispatcher, so that a sum over ranks counts it once: on the rank that
    passed it, or where tensor-parallel ranks pass the same tokens, each on one of them.
    """

    load_counter: torch.Tensor
    """int64 scalar: steps so far; step ``n`` is in row ``n % W``."""

    total_load: torch.Tensor
    """int64 ``[S]``: all that ``moe_load`` ever counted, since it was cleared."""

    def __init__(self, layer: int, stage: HeatStage) -> None:
        super().__init__()
        self._layer = layer
        self._heat_stage = stage

    def _track(self, placed: RankPlacement, heat_rows: int, device: torch.device) -> None:
        """Make the maps of a placement, and empty rings.

        Raises ``ValueError`` where a heat ring would have no row.
        """
        if heat_rows < 1:
            raise ValueError(f"layer {self._layer}: a heat ring has at least one row, got {heat_rows}")
        slots, experts = len(placed.logical_S), placed.expert_map_E.shape[0]
        maps = {
            "expert_map": placed.expert_map_E,
            "log2phy": placed.log2phy_E,
            "logical_to_physical_map": placed.replicas.log2phys_EC,
            "logical_replica_count": placed.replicas.counts_E,
        }
        rings = {
            "moe_load": torch.zeros(heat_rows, slots, dtype=torch.int32, device=device),
            "source_load": torch.zeros(heat_rows, experts, dtype=torch.int32, device=device),
            "load_counter": torch.zeros((), dtype=torch.int64, device=device),
            "total_load": torch.zeros(slots, dtype=torch.int64, device=device),
        }
        for name, table in maps.items():
            self.register_buffer(
                name, torch.tensor(table, dtype=torch.int32, device=device), persistent=False
            )
        for name, ring in rings.items():
            self.register_buffer(name, ring, persistent=False)

    def clear_moe_load(self) -> None:
        """Forget all heat, in place; steps go on being counted."""
        self.moe_load.zero_()
        self.total_load.zero_()
        if self.source_load is not None:
            self.source_load.zero_()

    def get_log2phy_map(self) -> torch.Tensor:
        """The physical expert that this rank's tokens of each logical one go to, int32 ``[E]``; ``[E, D]`` to deal."""
        return self.log2phy

    def update_expert_map(self, expert_map_E: torch.Tensor) -> None:
        """Write another map in place; ``ValueError`` where its shape is not ``[E]``."""
        if expert_map_E.shape != self.expert_map.shape:
            expected, found = list(self.expert_map.shape), list(expert_map_E.shape)
            raise ValueError(f"layer {self._layer}: expert_map must have the shape {expected}, got {found}")
        self.expert_map.copy_(expert_map_E)

    def install_placement(self, phy2log_RS: Int32) -> None:
        """Take note of where all ranks' replicas are, int32 ``[R, S]``, in place.

        Whoever writes another placement into the layer calls this on all ranks, between the same two steps.
        """
        columns = self.logical_to_physical_map.shape[1]
        table = replica_table(phy2log_RS, self.expert_map.shape[0], columns)
        self.logical_to_physical_map.copy_(torch.from_numpy(table.log2phys_EC))
        self.logical_replica_count.copy_(torch.from_numpy(table.counts_E))

    def _check_phase(self, phase: StepPhase | None) -> None:
        """Raise ``ValueError`` where the phase decides whether heat counts, and is not given."""
        if phase is None and self._heat_stage is not HeatStage.ALL:
            stage = self._heat_stage.value
            raise ValueError(
                f"layer {self._layer}: phase must be given at each step, for heat of {stage} alone"
            )

    def _counts(self, phase: StepPhase | None, profile: bool) -> bool:
        """Whether a step's heat counts."""
        return not profile and (phase is None or self._heat_stage.records(phase))

    def _record(self, received_S: torch.Tensor, ids_N: torch.Tensor, counts: bool) -> None:
        """Write a step's heat to its row of the rings; zeros where the step does not count.

        ``ids_N`` are this rank's own choices by logical expert, -1 for those that are not real.
        """
        experts = self.expert_map.shape[0]
        own_E = count_ids(ids_N % (experts + 1), experts + 1)[:-1]
        if not counts:
            received_S, own_E = torch.zeros_like(received_S), torch.zeros_like(own_E)
        write_row(self.moe_load, received_S, self.load_counter)
        if self.source_load is not None:
            write_row(self.source_load, own_E, self.load_counter)
        self.total_load.add_(received_S)
        self.load_counter.add_(1)


def write_row(ring_WX: torch.Tensor, counts_X: torch.Tensor, step: torch.Tensor) -> None:
    """Overwrite row ``step % W`` of a ring; ``step`` is an int64 scalar on the ring's device."""
    row = (step % ring_WX.shape[0]).reshape(1)
    ring_WX.index_copy_(0, row, counts_X.to(ring_WX.dtype).unsqueeze(0))
