"""What one rank must know of the placement that a layer starts with."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.placement import (
    Int32,
    PlacementError,
    check_layer,
    check_log2phy,
    check_shape,
    default_log2phy,
    expert_map,
)


@dataclass(frozen=True)
class RankPlacement:
    """One rank's view of one layer's placement."""

    logical_S: list[int]
    """The logical expert in each local slot."""

    expert_map_E: Int32
    log2phy_E: Int32


def rank_placement(
    layer: int,
    experts: int,
    phy2log_RS: Int32,
    rank: int,
    ranks: int,
    log2phy_E: Int32 | None,
    shared_tokens: bool,
) -> RankPlacement:
    """Check a layer's placement and take ``rank``'s view of it.

    Without ``log2phy_E`` the rank gets its default table, or rank 0's where all ranks see the same tokens and
    must agree. Raises ``PlacementError`` where placement, table and number of ranks do not fit together.
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
        log2phy_E = default_log2phy(phy2log_RS, experts)[0 if shared_tokens else rank]
    if log2phy_E.shape != (experts,):
        raise PlacementError(f"{where}: log2phy must have the shape [{experts}], got {list(log2phy_E.shape)}")
    check_log2phy(log2phy_E, phy2log_RS, f"{where}: log2phy")
    return RankPlacement(phy2log_RS[rank].tolist(), expert_map(phy2log_RS[rank], experts), log2phy_E)


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
