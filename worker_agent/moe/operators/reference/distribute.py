"""What both of MC2's fused exchanges share: their group, the choices that are sent, what they refuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.operators.contract import count_ids
from worker_agent.moe.operators.reference.local import require
from worker_agent.moe.rank_group import RankGroup

ASSIST_WIDTH = 128
"""int32 values of version 2's assist info per row; the first two are used: source rank, and choice within it."""


@dataclass(frozen=True)
class Choices:
    """The choices of one rank's tokens that are to be sent, in order of expert."""

    choice_of_row: torch.Tensor
    sent_RS: torch.Tensor

    @classmethod
    def of(
        cls, expert_ids_TK: torch.Tensor, active: torch.Tensor | None, ranks: int, experts: int
    ) -> Choices:
        """The choices of ``expert_ids`` that ``active`` (bool ``[T]`` or ``[T, K]``) leaves."""
        expert_N = expert_ids_TK.reshape(-1)
        if active is not None:
            active_TK = active if active.ndim == 2 else active.unsqueeze(1).expand_as(expert_ids_TK)
            expert_N = expert_N.masked_fill(~active_TK.reshape(-1), experts)
        counts_P = count_ids(expert_N, experts + 1)[:-1]
        return cls(expert_N.argsort(stable=True)[: int(counts_P.sum())], counts_P.view(ranks, -1))

    def place_within_expert(self) -> torch.Tensor:
        """How many sent rows of the same expert come before each row, int64 ``[rows]``."""
        counts_P = self.sent_RS.reshape(-1)
        first_P = counts_P.cumsum(0) - counts_P
        rows = torch.arange(self.choice_of_row.shape[0], device=counts_P.device)
        return rows - first_P.repeat_interleave(counts_P)


def named_group(group_ep: str, ep_world_size: int, ep_rank_id: int) -> RankGroup:
    """The group that an operator is to work in; ``ValueError`` where it is not the one described."""
    group = RankGroup.named(group_ep)
    require((group.size, group.rank) == (ep_world_size, ep_rank_id), f"group {group_ep!r} has other ranks")
    return group


def require_simple(
    group_ep: str,
    group_tp: str,
    tp_world_size: int,
    tp_rank_id: int,
    expert_shard_type: int,
    shared_expert_rank_num: int,
) -> None:
    """Refuse experts that are split further, and ranks that hold shared experts alone."""
    require(
        tp_world_size in (0, 1) and tp_rank_id == 0 and group_tp in ("", group_ep),
        "experts are not split further: tensor parallelism has one rank",
    )
    require(expert_shard_type == 0 and shared_expert_rank_num == 0, "no rank is set apart for shared experts")
