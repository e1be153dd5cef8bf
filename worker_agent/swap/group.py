"""The agents' own process groups: one for votes, one per lane for transfers, over a store of their own.

Nothing of the host engine's groups is used after the agents have met, so the agents can neither reorder nor delay the
model's collectives.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

_JOIN_TIMEOUT = timedelta(seconds=60)


class RendezvousError(RuntimeError):
    """The ranks do not fit together or cannot reach each other; raised on all, before any serves a token."""


class AgentGroup:
    """R agents of one EP group, joined by a TCP store that rank 0 hosts.

    Parameters
    ----------
    store
        Shared by all ranks, and by nobody else.
    registers
        The same store over a connection of its own: a call that waits on ``store`` does not hold it up.
    rank, size
        This rank and R.
    """

    def __init__(self, store: dist.Store, registers: dist.Store, rank: int, size: int) -> None:
        self.store = store
        self.registers = registers
        self.rank = rank
        self.size = size

    @classmethod
    def join(
        cls, host_group: dist.ProcessGroup, node: str, address: str, facts: Any
    ) -> tuple[AgentGroup, list[Any]]:
        """Join the ranks of ``host_group``; a collective, called once by each before serving.

        Parameters
        ----------
        host_group
            A CPU-capable group over the EP ranks (gloo), used only here.
        node
            Name of this rank's host; where all are one, the ranks meet on the loopback address.
        address
            Name or address at which the other ranks reach this host.
        facts
            Anything picklable; every rank gets the list of all ranks' facts, in order of rank.

        Raises ``RendezvousError``, on all ranks alike, where one cannot host or reach the store.
        """
        rank, size = dist.get_rank(host_group), dist.get_world_size(host_group)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (node, address, facts), group=host_group)
        one_node = len({there for there, _, _ in gathered}) == 1
        host = "127.0.0.1" if one_node else gathered[0][1]
        complaint: str | None = None
        stores: list[dist.Store] = []
        offer: list[Any] = [None]
        if rank == 0:
            try:
                server = dist.TCPStore(host, 0, size, True, _JOIN_TIMEOUT, wait_for_workers=False)
                stores, offer = [server], [server.port]
            except Exception as error:
                complaint = f"cannot host the agents' store at {host}: {error}"
        dist.broadcast_object_list(offer, src=dist.get_global_rank(host_group, 0), group=host_group)
        if offer[0] is not None:
            try:
                while len(stores) < 2:
                    stores.append(
                        dist.TCPStore(host, offer[0], size, False, _JOIN_TIMEOUT, wait_for_workers=False)
                    )
            except Exception as error:
                complaint = f"cannot reach the agents' store at {host}:{offer[0]}: {error}"
        agree(host_group, complaint)
        return cls(stores[0], stores[1], rank, size), [own for _, _, own in gathered]

    def process_group(self, name: str, timeout: timedelta) -> dist.ProcessGroup:
        """A new gloo group of these ranks; every rank asks for it by the same name, in its own time."""
        store = dist.PrefixStore(f"eplb/{name}", self.store)
        backend = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        # A backend has a process group's methods; torch's type stubs do not list them.
        return cast("dist.ProcessGroup", backend)


def agree(host_group: dist.ProcessGroup, complaint: str | None) -> None:
    """Raise ``RendezvousError`` on all ranks where any has a complaint. A collective."""
    complaints: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(complaints, complaint, group=host_group)
    for rank, theirs in enumerate(complaints):
        if theirs is not None:
            raise RendezvousError(f"rank {rank}: {theirs}")
