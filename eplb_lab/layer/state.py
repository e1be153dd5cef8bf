"""A layer's table, checked against its placement, and the maps and heat that balancing works on.

Dimensions in names: R ranks, E logical experts, S slots of one rank.
"""

from __future__ import annotations

import torch

from eplb_core.placement import (
    MAX_ENTRIES,
    Int32,
    PlacementError,
    check_layer,
    check_log2phy,
    check_shape,
    default_log2phy,
    expert_map,
)
from worker_agent.counting import count_ids


def checked_table(
    layer: int,
    experts: int,
    phy2log_RS: Int32,
    rank: int,
    ranks: int,
    log2phy_E: Int32 | None,
    shared_tokens: bool,
    dealing_width: int = 1,
) -> Int32:
    """Check a layer's placement, and return ``rank``'s table, int32 ``[E]`` or ``[E, D]``, checked as well.

    Without ``log2phy_E`` the rank gets its default table of ``dealing_width`` entries, or rank 0's where all ranks see
    the same tokens and must agree (``shared_tokens``). Raises ``PlacementError``, naming the ``layer``, where
    placement, table and number of ``ranks`` do not fit together or to ``experts``; ``phy2log_RS`` is int32 ``[R, S]``.
    """
    where = f"layer {layer}"
    if phy2log_RS.ndim != 2 or phy2log_RS.shape[0] != ranks:
        found = list(phy2log_RS.shape)
        raise PlacementError(f"{where}: phy2log must have the shape [{ranks} ranks, slots], got {found}")
    try:
        check_shape(experts, ranks, phy2log_RS.shape[1])
    except PlacementError as problem:
        raise PlacementError(f"{where}: {problem}") from problem
    check_layer(phy2log_RS, experts, where)
    if log2phy_E is None:
        if not 1 <= dealing_width <= MAX_ENTRIES:
            raise PlacementError(
                f"{where}: a dealing table has 1 to {MAX_ENTRIES} entries, got {dealing_width}"
            )
        tables_RE = default_log2phy(phy2log_RS, experts, dealing_width)
        log2phy_E = tables_RE[0 if shared_tokens else rank]
    if log2phy_E.ndim not in (1, 2) or log2phy_E.shape[0] != experts:
        raise PlacementError(f"{where}: log2phy must have the shape [{experts}], got {list(log2phy_E.shape)}")
    check_log2phy(log2phy_E, phy2log_RS, f"{where}: log2phy", deals=log2phy_E.ndim == 2)
    return log2phy_E


def check_grouped(layer: int, phy2log_RS: Int32) -> None:
    """Raise ``PlacementError`` unless each rank holds one group of consecutive experts, in whatever order."""
    slots = phy2log_RS.shape[1]
    for rank, logical_S in enumerate(phy2log_RS):
        group = range(rank * slots, (rank + 1) * slots)
        if sorted(logical_S.tolist()) != list(group):
            raise PlacementError(
                f"layer {layer}: grouped experts: rank {rank} must hold experts {group.start}..{group.stop - 1}, "
                f"got {logical_S.tolist()}"
            )


class EplbState(torch.nn.Module):
    """One layer's maps and heat on one rank; all are tensors that keep their addresses."""

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, -1 where this rank has none."""

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id for this rank's tokens of each expert; ``[E, D]`` for several in turn."""

    moe_load: torch.Tensor
    """int32 ``[W, S]``: token choices that each slot worked on, from all ranks."""

    source_load: torch.Tensor | None
    """int32 ``[W, E]``: choices of the tokens that this rank passed to ``forward``, by logical expert.

    Each token counts on one rank under every dispatcher, so that a sum over ranks counts it once: on the rank that
    passed it, or where tensor-parallel ranks pass the same tokens, each on one of them.
    """

    load_counter: torch.Tensor
    """int64 scalar: steps so far; step ``n`` is in row ``n % W``."""

    def _track(
        self, phy2log_RS: Int32, rank: int, log2phy_E: Int32, heat_rows: int, device: torch.device
    ) -> None:
        """Make the maps of a placement that is checked, and empty rings."""
        slots, experts = phy2log_RS.shape[1], log2phy_E.shape[0]
        tables = {
            "expert_map": torch.tensor(expert_map(phy2log_RS[rank], experts), dtype=torch.int32),
            "log2phy": torch.tensor(log2phy_E, dtype=torch.int32),
            "moe_load": torch.zeros(heat_rows, slots, dtype=torch.int32),
            "source_load": torch.zeros(heat_rows, experts, dtype=torch.int32),
            "load_counter": torch.zeros((), dtype=torch.int64),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(device), persistent=False)

    def _record(self, received_S: torch.Tensor, ids_N: torch.Tensor, counts: bool) -> None:
        """Write a step's heat to its row of the rings; zeros where the step does not count.

        ``ids_N`` are this rank's own choices by logical expert, -1 for those that are not real.
        """
        experts = self.expert_map.shape[0]
        own_E = count_ids(ids_N % (experts + 1), experts + 1)[:-1]
        if not counts:
            received_S, own_E = torch.zeros_like(received_S), torch.zeros_like(own_E)
        _write_row(self.moe_load, received_S, self.load_counter)
        if self.source_load is not None:
            _write_row(self.source_load, own_E, self.load_counter)
        self.load_counter.add_(1)


def _write_row(ring_WX: torch.Tensor, counts_X: torch.Tensor, step: torch.Tensor) -> None:
    """Overwrite row ``step % W`` of a ring; ``step`` is an int64 scalar on the ring's device."""
    row = (step % ring_WX.shape[0]).reshape(1)
    ring_WX.index_copy_(0, row, counts_X.to(ring_WX.dtype).unsqueeze(0))
