"""Expert map, table and heat of one layer on one rank, and the validation of placements and tables.

Dimensions in names: R ranks, E logical experts, S slots per rank.
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
    """Validate a placement and the rank's table, and return the table.

    Parameters
    ----------
    layer
        Layer index, for error messages.
    experts
        E, the number of logical experts.
    phy2log_RS
        Placement, int32 ``[R, S]``.
    rank
        Index of this rank.
    ranks
        R, the number of ranks.
    log2phy_E
        The rank's table, or ``None`` for the default table.
    shared_tokens
        True if all ranks see the same tokens. The default table is then rank 0's table on every rank.
    dealing_width
        D, the number of entries per expert in the default table.

    Returns
    -------
    Int32
        ``[E]``, or ``[E, D]`` for a dealing table.

    Raises
    ------
    PlacementError
        If the placement, table, ranks and experts are inconsistent.
    """
    prefix = f"layer {layer}"
    if phy2log_RS.ndim != 2 or phy2log_RS.shape[0] != ranks:
        raise PlacementError(
            f"{prefix}: phy2log must have shape [{ranks} ranks, slots], got {list(phy2log_RS.shape)}"
        )
    try:
        check_shape(experts, ranks, phy2log_RS.shape[1])
    except PlacementError as problem:
        raise PlacementError(f"{prefix}: {problem}") from problem
    check_layer(phy2log_RS, experts, prefix)
    if log2phy_E is None:
        if not 1 <= dealing_width <= MAX_ENTRIES:
            raise PlacementError(
                f"{prefix}: a dealing table must have 1 to {MAX_ENTRIES} entries, got {dealing_width}"
            )
        tables_RE = default_log2phy(phy2log_RS, experts, dealing_width)
        log2phy_E = tables_RE[0 if shared_tokens else rank]
    if log2phy_E.ndim not in (1, 2) or log2phy_E.shape[0] != experts:
        raise PlacementError(f"{prefix}: log2phy must have shape [{experts}], got {list(log2phy_E.shape)}")
    check_log2phy(log2phy_E, phy2log_RS, f"{prefix}: log2phy", deals=log2phy_E.ndim == 2)
    return log2phy_E


def check_grouped(layer: int, phy2log_RS: Int32) -> None:
    """Raise ``PlacementError`` unless rank r holds the r-th group of S consecutive experts, in any order."""
    slots = phy2log_RS.shape[1]
    for rank, logical_S in enumerate(phy2log_RS):
        group = range(rank * slots, (rank + 1) * slots)
        if sorted(logical_S.tolist()) != list(group):
            raise PlacementError(
                f"layer {layer}: grouped experts: rank {rank} must hold experts {group.start}..{group.stop - 1}, "
                f"got {logical_S.tolist()}"
            )


class EplbState(torch.nn.Module):
    """Expert map, table and heat of one layer on one rank, in tensors that keep their addresses."""

    expert_map: torch.Tensor
    """int32 ``[E]``: local slot of each expert, or -1 if this rank does not hold it."""

    log2phy: torch.Tensor
    """int32 ``[E]``: physical id to which this rank sends its tokens of each expert; ``[E, D]`` for a dealing table."""

    moe_load: torch.Tensor
    """int32 ``[W, S]``: number of token choices that each slot received from all ranks."""

    source_load: torch.Tensor | None
    """int32 ``[W, E]``: number of choices of this rank's own tokens, by logical expert.

    With every dispatcher, only the rank that passes a token to ``forward`` counts it, so a sum over ranks counts it
    once. If tensor-parallel ranks pass the same tokens, each rank counts a share of them.
    """

    load_counter: torch.Tensor
    """int64 scalar: number of steps so far. Row ``n % W`` of the rings holds step ``n``."""

    def _track(
        self, phy2log_RS: Int32, rank: int, log2phy_E: Int32, heat_rows: int, device: torch.device
    ) -> None:
        """Register the expert map, the table of a validated placement, and zeroed heat rings."""
        slots = phy2log_RS.shape[1]
        experts = log2phy_E.shape[0]
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
        """Write the heat of a step to the step's row of each ring.

        Parameters
        ----------
        received_S
            Number of token choices that each local slot received.
        ids_N
            Logical experts of this rank's own choices, or -1 for padding choices.
        counts
            False to write zeros.
        """
        experts = self.expert_map.shape[0]
        source_E = count_ids(ids_N % (experts + 1), experts + 1)[:-1]
        if not counts:
            received_S = torch.zeros_like(received_S)
            source_E = torch.zeros_like(source_E)
        _write_row(self.moe_load, received_S, self.load_counter)
        if self.source_load is not None:
            _write_row(self.source_load, source_E, self.load_counter)
        self.load_counter.add_(1)


def _write_row(ring_WX: torch.Tensor, counts_X: torch.Tensor, step: torch.Tensor) -> None:
    """Overwrite row ``step % W`` of a ring, where ``step`` is an int64 scalar on the ring's device."""
    row = (step % ring_WX.shape[0]).reshape(1)
    ring_WX.index_copy_(0, row, counts_X.to(ring_WX.dtype).unsqueeze(0))
