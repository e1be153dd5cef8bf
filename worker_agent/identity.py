"""Who this rank is among its EP group: agreed once, when the ranks meet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """Facts that stay for the life of an agent, checked to be consistent across the ranks.

    Parameters
    ----------
    deployment
        Name of the served model instance.
    group_id
        Drawn by rank 0 when the group met.
    rank, ranks
        This rank and R.
    node
        Host of this rank.
    token_groups
        Per rank, the group of ranks that see the same tokens.
    layers, experts, slots
        L, E and S.
    bytes_per_expert
        Bytes of one expert of one layer, over all tensors that a kernel reads.
    """

    deployment: str
    group_id: str
    rank: int
    ranks: int
    node: str
    token_groups: tuple[int, ...]
    layers: int
    experts: int
    slots: int
    bytes_per_expert: int
