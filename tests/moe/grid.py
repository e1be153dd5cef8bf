"""Eight ranks as a grid of data-parallel and tensor-parallel groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from worker_agent.moe.rank_group import RankGroup

_grids: dict[int, Grid] = {}


@dataclass(frozen=True)
class Grid:
    """One rank's groups: rank ``dp_rank * tp.size + tp.rank`` of ``ep``, which has all ranks."""

    ep: RankGroup
    dp: RankGroup
    tp: RankGroup
    ep_process_group: dist.ProcessGroup

    @property
    def dp_rank(self) -> int:
        return self.dp.rank


def grid(tp: int) -> Grid:
    """This rank's groups, made once a process; all ranks must ask together."""
    if tp not in _grids:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ep = dist.new_group(list(range(ranks)))
        tps = [dist.new_group(list(range(first, first + tp))) for first in range(0, ranks, tp)]
        dps = [dist.new_group(list(range(column, ranks, tp))) for column in range(tp)]
        _grids[tp] = Grid(RankGroup(ep), RankGroup(dps[rank % tp]), RankGroup(tps[rank // tp]), ep)
    return _grids[tp]
