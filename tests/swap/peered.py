"""Agents' groups in one process, joined without a host group: for tests of what ranks ask each other."""

from __future__ import annotations

from worker_agent.swap.group import AgentGroup

SECRET = b"of this formation"


def joined(ranks: int, patience: float = 5.0) -> list[AgentGroup]:
    """``ranks`` groups that know each other."""
    groups = [AgentGroup("127.0.0.1", patience) for _ in range(ranks)]
    addresses = [group.peers.address for group in groups]
    for rank, group in enumerate(groups):
        group.open(SECRET, rank, addresses)
    return groups
