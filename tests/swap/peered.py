"""Agent groups in one process, without a host group, for tests of the messages between peers."""

from __future__ import annotations

from worker_agent.swap.group import AgentGroup
from worker_agent.swap.peers import Peers

SECRET = b"secret of this group"


def joined(ranks: int, patience: float = 5.0) -> list[AgentGroup]:
    """Return the agent groups of ``ranks`` ranks whose links to each other are open."""
    sockets = [Peers("127.0.0.1") for _ in range(ranks)]
    addresses = [peers.address for peers in sockets]
    groups = [AgentGroup(peers, SECRET, rank, addresses, patience) for rank, peers in enumerate(sockets)]
    assert [group.peers.unlinked() for group in groups] == [[]] * ranks
    return groups
