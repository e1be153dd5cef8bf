"""Who this rank is among its EP group: agreed once, when the ranks meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service import __version__
from eplb_service.wire.hello import Hello, Shape
from worker_agent.swap.installed import Installed


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
    width
        D, entries of the dealing tables that the layers read.
    rank_bound
        Whether experts must stay on their ranks.
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
    width: int = 1
    rank_bound: bool = False

    @property
    def shape(self) -> Shape:
        """Sizes, and what else all ranks share."""
        return Shape(
            self.ranks,
            self.layers,
            self.experts,
            self.slots,
            self.bytes_per_expert,
            self.width,
            self.rank_bound,
        )

    def hello(self, installed: Installed, highest_term: int = 0) -> Hello:
        """How this rank introduces itself while it serves ``installed`` and follows services of this term or higher."""
        return Hello(
            deployment=self.deployment,
            rank=self.rank,
            node=self.node,
            token_group=self.token_groups[self.rank],
            group_id=self.group_id,
            shape=self.shape,
            epoch=installed.epoch,
            digest=installed.digest,
            layer_epochs=installed.layer_epochs,
            slots_LS=np.ascontiguousarray(installed.placement.phy2log_LRS[:, self.rank]),
            log2phy_LE=installed.log2phy_LE,
            agent_version=__version__,
            highest_term=highest_term,
        )
