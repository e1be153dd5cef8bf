"""Where the ranks are: nodes, which ranks see the same tokens, and whether experts may leave them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core.placement import Int32


class TopologyError(ValueError):
    """A topology that describes no set of ranks; the message says what was found."""


@dataclass(frozen=True)
class Topology:
    """Nodes and token groups of R ranks.

    Parameters
    ----------
    nodes_R
        int32 ``[R]``, node of each rank; transfers within a node are cheaper.
    token_groups_R
        int32 ``[R]``; ranks with the same number see the same tokens (all-gather dispatch) and must get one log2phy.
    bytes_per_expert
        Weights of one expert, by which the bytes that moves send are counted.
    rank_bound
        Whether experts may not leave their ranks, as grouped experts (MoGE), of which every rank has a group.
    device
        Name of the ranks' device in torch; empty if it is unknown or differs between ranks.

    Raises
    ------
    TopologyError
        On a wrong shape or a negative number.
    """

    nodes_R: Int32
    token_groups_R: Int32
    bytes_per_expert: int = 0
    rank_bound: bool = False
    device: str = ""

    def __post_init__(self) -> None:
        for name in ("nodes_R", "token_groups_R"):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int32)
            if array.ndim != 1 or array.size == 0:
                raise TopologyError(f"{name} has the shape [ranks], got {list(array.shape)}")
            if array.min() < 0:
                raise TopologyError(f"{name} numbers from 0, got {array.min()}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.nodes_R.shape != self.token_groups_R.shape:
            raise TopologyError(
                f"nodes of {self.nodes_R.size} ranks but token groups of {self.token_groups_R.size}; each rank has both"
            )
        if self.bytes_per_expert < 0:
            raise TopologyError(f"bytes_per_expert is {self.bytes_per_expert}; it cannot be negative")

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.nodes_R.size)

    def token_groups(self) -> tuple[Int32, Int32, Int32]:
        """Numbers ``[G]`` of the token groups, the first rank ``[G]`` of each, and each rank's group ``[R]``."""
        numbers_G, first_G, place_R = np.unique(self.token_groups_R, return_index=True, return_inverse=True)
        return numbers_G, first_G.astype(np.int32), place_R.astype(np.int32)

    def nodes(self) -> tuple[Int32, Int32]:
        """Each rank's node ``[R]``, numbered from 0 without gaps, and each token group's ``[G]``, in their order.

        A group whose ranks are on several nodes has -1: its tokens are on all of them.
        """
        _, first_G, group_R = self.token_groups()
        node_R = np.unique(self.nodes_R, return_inverse=True)[1].astype(np.int32)
        node_G = node_R[first_G]
        node_G[group_R[node_R != node_G[group_R]]] = -1
        return node_R, node_G

    @classmethod
    def flat(cls, ranks: int) -> Topology:
        """One node, every rank with tokens of its own.

        Parameters
        ----------
        ranks
            R.

        Returns
        -------
        Topology
            What deployments on one host have.
        """
        return cls(np.zeros(ranks, dtype=np.int32), np.arange(ranks, dtype=np.int32))
