"""The expert-parallel group of a deployment: its ranks, their common layout, and rejected ranks.

The engines draw an id whenever they form a group. The group's layout is known once all of its ranks have connected and
agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from eplb_core.planner.topology import Topology
from eplb_core.wire.agent import Hello, Shape
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import AlreadyConnectedError, ConflictError

_MAX_LISTED_RANKS = 8
"""Maximum number of ranks listed in a message."""
_MAX_REJECTIONS = 16
"""Number of rejected ranks that are remembered."""
_REJECTION_SECONDS = 60.0
"""Time for which a rejection is reported as a problem. An agent that belongs here retries within seconds."""
_INCOMPLETE_SECONDS = 60.0
"""Time that ranks may wait for the rest of their group before another group may replace it."""

Assembled: TypeAlias = tuple[Mapping[int, Hello], DeployedLayout | ConflictError]
"""Result of assembling a layout: the Hellos that waited for the last one, and the layout or the reason why the Hellos
contradict each other."""


@dataclass(frozen=True)
class Member:
    """One rank as it last reported (immutable).

    Parameters
    ----------
    rank
        Number of the rank in its group.
    node
        Name of the rank's node.
    epoch
        Epoch of the layout that the rank serves.
    digest
        Digest of the placement that the rank serves.
    token_group
        Number of the rank's token group. Ranks of one token group see the same tokens.
    agent_version
        Release of the agent.
    highest_term
        Highest leader term that the rank had received before its Hello.
    connected
        True while the rank's stream is open.
    step
        Latest step of the rank.
    error
        Reason why balancing is halted on the rank; empty if it is not.
    dropped_steps
        Number of steps whose heat the rank dropped because it could not send it in time.
    staging_bytes
        Bytes of the staging buffers; ``None`` if unknown.
    ring_bytes
        Bytes of the rings in which the layers count heat; ``None`` if unknown.
    device
        Name of the rank's device in torch; empty on a CPU.
    """

    rank: int
    node: str
    epoch: int
    digest: int
    token_group: int
    agent_version: str
    highest_term: int
    connected: bool = True
    step: int = 0
    error: str = ""
    dropped_steps: int = 0
    staging_bytes: int | None = None
    ring_bytes: int | None = None
    device: str = ""

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest that the rank serves."""
        return self.epoch, self.digest


@dataclass(frozen=True)
class Group:
    """One expert-parallel group (immutable).

    Parameters
    ----------
    group_id
        Id of the group, drawn by the engines.
    shape
        Number of ranks, layers, experts and slots, and size of an expert.
    members
        Ranks that have ever connected, by rank.
    waiting
        Hellos that wait for the rest of the group, by rank; empty once the group is complete.
    live
        Current layout; ``None`` while the group is incomplete.
    """

    group_id: str
    shape: Shape
    members: Mapping[int, Member] = field(default_factory=dict)
    waiting: Mapping[int, Hello] = field(default_factory=dict)
    live: DeployedLayout | None = None

    @property
    def forming(self) -> tuple[str, Shape]:
        """Identity of the group: its id and shape."""
        return self.group_id, self.shape

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is open."""
        return [member for member in self.members.values() if member.connected]

    @property
    def missing(self) -> list[int]:
        """Ranks without a stream, in ascending order."""
        connected_ranks = {member.rank for member in self.connected}
        return [rank for rank in range(self.shape.ranks) if rank not in connected_ranks]

    @property
    def out_of_step(self) -> list[int]:
        """Connected ranks that serve another version than the group's current layout."""
        if self.live is None:
            return []
        return [member.rank for member in self.connected if member.version != self.live.version]

    @property
    def switched_rank(self) -> int | None:
        """A rank of an incomplete group that has switched since its Hello; ``None`` if there is no such rank.

        Its Hello is outdated and would contradict the Hellos of the ranks that are still missing.
        """
        hellos = self.waiting.items()
        return next((rank for rank, hello in hellos if self.members[rank].version != hello.version), None)

    @property
    def highest_term(self) -> int:
        """Highest leader term reported by any rank. The ranks reject plans of a lower term."""
        return max((member.highest_term for member in self.members.values()), default=0)

    @property
    def topology(self) -> Topology:
        """Topology of the ranks. Every rank must have connected once.

        Nodes are numbered in order of their first rank. The device is empty if the ranks' devices differ.
        """
        members = [self.members[rank] for rank in range(self.shape.ranks)]
        nodes = dict.fromkeys(member.node for member in members)
        numbers = {node: number for number, node in enumerate(nodes)}
        devices = {member.device for member in members}
        return Topology(
            np.array([numbers[member.node] for member in members], dtype=np.int32),
            np.array([member.token_group for member in members], dtype=np.int32),
            self.shape.bytes_per_expert,
            self.shape.rank_bound,
            members[0].device if len(devices) == 1 else "",
        )

    def is_replaced_by(self, hello: Hello, overdue: bool = False) -> bool:
        """Return True if the rank's group replaces this one.

        Another group can only replace this one once all connected ranks have left, unless this group is overdue.

        Parameters
        ----------
        hello
            Hello of a rank.
        overdue
            True if the ranks of this group have waited too long for the rest of their group.

        Raises
        ------
        AlreadyConnectedError
            If the same rank of this group is still connected.
        ConflictError
            If the rank belongs to another group while ranks of this one are still connected.
        """
        if overdue and hello.group_id != self.group_id:
            return True
        connected = [member.rank for member in self.connected]
        if hello.rank in connected:
            raise AlreadyConnectedError(
                f"rank {hello.rank} is already connected; give each agent its own rank, and each model instance "
                "its own deployment"
            )
        if (hello.group_id, hello.shape) == self.forming:
            return False
        if connected and hello.group_id != self.group_id:
            raise ConflictError(
                f"rank {hello.rank} does not belong to the group of {rank_list(connected)}; "
                "it can join once all ranks of that group have disconnected"
            )
        return not connected

    def is_completed_by(self, hello: Hello) -> bool:
        """Return True if ``hello`` comes from the last missing rank."""
        return (
            self.live is None
            and (hello.group_id, hello.shape) == self.forming
            and hello.rank not in self.waiting
            and len(self.waiting) + 1 == self.shape.ranks
        )

    def assembled(self, hello: Hello) -> Assembled:
        """Assemble the group's layout, given the last missing Hello.

        This is slow for large groups and should not run on the event loop.
        """
        try:
            return self.waiting, DeployedLayout.assembled({**self.waiting, hello.rank: hello})
        except ConflictError as error:
            return self.waiting, error

    def with_hello(self, hello: Hello, assembled: Assembled | None = None) -> Group:
        """Return the group with a rank connected.

        Raises ``ConflictError`` if the Hello contradicts the group's shape, its layout or the other Hellos.

        Parameters
        ----------
        hello
            Hello of the rank.
        assembled
            Layout that was assembled in advance with this Hello as the last one. It is ignored if the waiting ranks
            have changed since, or if ranks are still missing.
        """
        if hello.shape != self.shape:
            raise ConflictError(f"rank {hello.rank} {_shape_difference(hello.shape, self.shape)}")
        group = self
        if self.live is not None and hello.version != self.live.version:
            if self.connected:
                raise ConflictError(_version_difference(hello, *self.live.version))
            # The ranks' layout is authoritative. No connected rank confirms the known one, so ask all ranks again.
            group = self.without_live()
        if group.live is None:
            group = group._with_waiting(hello, assembled)
        else:
            _check_rejoining(hello, group.live)
        names = ("rank", "node", "epoch", "digest", "token_group", "agent_version", "highest_term", "device")
        step = self.members[hello.rank].step if hello.rank in self.members else 0
        member = Member(**{name: getattr(hello, name) for name in names}, step=step)
        return replace(group, members={**self.members, hello.rank: member})

    def without_stream(self, rank: int) -> Group:
        """Return the group with a rank disconnected. Its Hello is dropped, since it may be outdated later."""
        waiting = {
            waiting_rank: hello for waiting_rank, hello in self.waiting.items() if waiting_rank != rank
        }
        return replace(self.with_member(rank, connected=False), waiting=waiting)

    def with_member(self, rank: int, **changes: Any) -> Group:
        """Return the group with some fields of one member changed."""
        # This is equivalent to `replace` in half the time, because it runs for every report.
        member = Member(**{**vars(self.members[rank]), **changes})
        return Group(**{**vars(self), "members": {**self.members, rank: member}})

    def without_live(self) -> Group:
        """Return the group without a layout. Every rank must send another Hello."""
        return replace(self, live=None)

    def _with_waiting(self, hello: Hello, assembled: Assembled | None) -> Group:
        """Add a Hello to those that wait for the rest of the group, and set the layout if it is the last one."""
        first = next(iter(self.waiting.values()), None)
        if first is not None and hello.version != first.version:
            raise ConflictError(_version_difference(hello, *first.version))
        if first is not None and hello.layer_epochs != first.layer_epochs:
            raise ConflictError(f"rank {hello.rank} and rank {first.rank} report different layer epochs")
        waiting = {**self.waiting, hello.rank: hello}
        if len(waiting) < self.shape.ranks:
            return replace(self, waiting=waiting)
        if assembled is None or assembled[0] is not self.waiting:
            assembled = self.assembled(hello)
        _, layout = assembled
        if isinstance(layout, ConflictError):
            raise layout
        return replace(self, live=layout, waiting={})


@dataclass(frozen=True)
class Attendance:
    """Rejected ranks, and how long ranks have been waiting or gone (immutable).

    Parameters
    ----------
    rejections
        Reason of each rejection and time of the first check after it, by rank. The time is ``None`` before that check.
    forming_since
        Time since which connected ranks have waited for the rest of their group; ``None`` if no rank is waiting.
    forming_overdue
        True if they have waited so long that another group may replace this one.
    departed_since
        Time since which no rank is connected; ``None`` if a rank is connected.
    """

    rejections: Mapping[int, tuple[str, float | None]] = field(default_factory=dict)
    forming_since: float | None = None
    forming_overdue: bool = False
    departed_since: float | None = None

    def with_rejection(self, rank: int, reason: str) -> Attendance:
        """Record that a rank was rejected. Only the latest rejections are kept."""
        rejections = {**self.rejections, rank: (reason, None)}
        return replace(self, rejections=dict(list(rejections.items())[-_MAX_REJECTIONS:]))

    def without_rejection(self, rank: int) -> Attendance:
        """Forget the rejection of a rank."""
        rejections = {rejected: entry for rejected, entry in self.rejections.items() if rejected != rank}
        return replace(self, rejections=rejections)

    def after(self, now: float, *, connected: bool, waiting: bool) -> Attendance:
        """Return the state at time ``now``, and forget old rejections.

        Parameters
        ----------
        now
            Current time, in seconds.
        connected
            True if any rank is connected.
        waiting
            True if connected ranks wait for the rest of their group.
        """
        rejections = {
            rank: (reason, now if since is None else since)
            for rank, (reason, since) in self.rejections.items()
            if since is None or now - since < _REJECTION_SECONDS
        }
        departed_since = None
        if not connected:
            departed_since = now if self.departed_since is None else self.departed_since
        if not waiting:
            return Attendance(rejections, departed_since=departed_since)
        forming_since = now if self.forming_since is None else self.forming_since
        overdue = self.forming_since is not None and now - forming_since >= _INCOMPLETE_SECONDS
        return Attendance(rejections, forming_since, overdue, departed_since)


def rank_list(ranks: Sequence[int]) -> str:
    """Return the ranks as text, at most eight of them by number.

    Examples
    --------
    >>> rank_list([3])
    'rank 3'
    >>> rank_list(range(10))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    numbers = ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    suffix = f" and {len(ranks) - _MAX_LISTED_RANKS} more" if len(ranks) > _MAX_LISTED_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}{suffix}"


def _check_rejoining(hello: Hello, live: DeployedLayout) -> None:
    """Raise ``ConflictError`` if a returning rank's slots or tables differ from the current layout."""
    for layer, (slots_S, table_E) in enumerate(zip(hello.slots_LS, hello.log2phy_LE, strict=True)):
        if not np.array_equal(live.placement.phy2log_LRS[layer, hello.rank], slots_S):
            raise ConflictError(
                f"rank {hello.rank} holds different experts in layer {layer} than its digest implies"
            )
        if not np.array_equal(live.tables_L[layer][hello.rank], table_E):
            raise ConflictError(
                f"rank {hello.rank} has a different log2phy in layer {layer} than the service has on record"
            )


def _version_difference(hello: Hello, epoch: int, digest: int) -> str:
    """Return the message for a rank whose version differs from the given one of the other ranks."""
    return (
        f"rank {hello.rank} serves epoch {hello.epoch} digest {hello.digest:#x}, "
        f"but the other ranks serve epoch {epoch} digest {digest:#x}"
    )


def _shape_difference(shape: Shape, group_shape: Shape) -> str:
    """Return the second half of the message for a rank whose shape differs from the group's."""
    differences = [
        f"{name} {value} instead of {getattr(group_shape, name)}"
        for name, value in vars(shape).items()
        if value != getattr(group_shape, name)
    ]
    return f"has a different shape than the other ranks: {', '.join(differences)}"
