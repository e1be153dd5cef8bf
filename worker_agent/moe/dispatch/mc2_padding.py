"""Where padding goes when MC2's operators understand no mask, and how it is kept out of the heat."""

from __future__ import annotations

import torch

from worker_agent.moe.rank_group import RankGroup


def spread_out(physical_TK: torch.Tensor, active_TK: torch.Tensor, first: int, experts: int) -> torch.Tensor:
    """Choices, those that are not real replaced: choice ``k`` goes to expert ``first + k``.

    They are distinct within a token that is padding as a whole, as the operators demand, and begin on the rank of
    expert ``first``.
    """
    choices = torch.arange(physical_TK.shape[1], device=physical_TK.device, dtype=physical_TK.dtype)
    return torch.where(active_TK, physical_TK, (first + choices) % experts)


def arriving_padding(
    group: RankGroup, physical_TK: torch.Tensor, active_TK: torch.Tensor, experts: int
) -> torch.Tensor:
    """Padding that comes to each of this rank's slots, int64 ``[S]``; one small exchange."""
    idle_N = physical_TK[~active_TK]
    idle_P = torch.zeros(experts, dtype=torch.int64, device=physical_TK.device)
    idle_P.index_add_(0, idle_N, torch.ones_like(idle_N, dtype=torch.int64))
    return group.exchange(idle_P.view(group.size, -1)).sum(dim=0)
