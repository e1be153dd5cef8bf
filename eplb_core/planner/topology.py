"""Topology of the ranks: their nodes, the groups of ranks that see the same tokens, and restrictions on moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core.placement import Int32


class TopologyError(ValueError):
    """The topology is invalid. The message names the field and its value."""


@dataclass(frozen=True)
class Topology:
    """Nodes and token groups of R ranks.

    Parameters
    ----------
    nodes_R
        int32 ``[R]``, node of each rank. Transfers within a node are cheaper.
    token_groups_R
        int32 ``[R]``, token group of each rank. Ranks in the same group see the same tokens (all-gather dispatch) and
        must have the same log2phy tables.
    bytes_per_expert
        Size of one expert's weights, used to count the bytes that moves send.
    rank_bound
        True if experts cannot leave their ranks, as with grouped experts (MoGE), where each rank hosts one group.
    device
        Device name of the ranks as reported by torch; empty if it is unknown or differs between ranks.

    Raises
    ------
    TopologyError
        If an array has the wrong shape or a number is negative.
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
                raise TopologyError(f"expected {name} of shape [ranks], got {list(array.shape)}")
            if array.min() < 0:
                raise TopologyError(f"{name} must not be negative, got {array.min()}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.nodes_R.shape != self.token_groups_R.shape:
            raise TopologyError(
                f"got nodes for {self.nodes_R.size} ranks but token groups for {self.token_groups_R.size}; "
                "specify one node and one token group per rank"
            )
        if self.bytes_per_expert < 0:
            raise TopologyError(f"bytes_per_expert is {self.bytes_per_expert}; it cannot be negative")

    @property
    def ranks(self) -> int:
        """R, number of ranks."""
        return int(self.nodes_R.size)

    def token_groups(self) -> tuple[Int32, Int32, Int32]:
        """Return the token groups in ascending order of their ids.

        Returns
        -------
        number_G : Int32
            int32 ``[G]``, id of each group, as in ``token_groups_R``.
        first_G : Int32
            int32 ``[G]``, first rank of each group.
        group_R : Int32
            int32 ``[R]``, index of each rank's group.
        """
        number_G, first_G, group_R = np.unique(self.token_groups_R, return_index=True, return_inverse=True)
        return number_G, first_G.astype(np.int32), group_R.astype(np.int32)

    def nodes(self) -> tuple[Int32, Int32]:
        """Return the node of each rank and of each token group, with nodes numbered from 0 without gaps.

        Returns
        -------
        node_R : Int32
            int32 ``[R]``, node of each rank.
        node_G : Int32
            int32 ``[G]``, node of each token group; -1 if the group's ranks are on several nodes, because its tokens
            are then present on all of them.

        Examples
        --------
        There are four ranks on two nodes. Ranks 1 and 2 see the same tokens but are on different nodes:

        >>> topology = Topology(nodes_R=np.array([5, 5, 7, 7]), token_groups_R=np.array([0, 1, 1, 2]))
        >>> node_R, node_G = topology.nodes()
        >>> node_R.tolist()
        [0, 0, 1, 1]
        >>> node_G.tolist()
        [0, -1, 1]
        """
        _, first_G, group_R = self.token_groups()
        node_R = np.unique(self.nodes_R, return_inverse=True)[1].astype(np.int32)
        node_G = node_R[first_G]
        node_G[group_R[node_R != node_G[group_R]]] = -1
        return node_R, node_G

    @classmethod
    def flat(cls, ranks: int) -> Topology:
        """Return the topology of a deployment on one host: one node, and different tokens on every rank.

        Parameters
        ----------
        ranks
            R, number of ranks.

        Returns
        -------
        Topology
            Topology in which rank ``r`` forms token group ``r``, on node 0.
        """
        return cls(np.zeros(ranks, dtype=np.int32), np.arange(ranks, dtype=np.int32))
