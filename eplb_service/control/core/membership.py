"""How the ranks of one EP group come together: they must agree, and only all of them make a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eplb_service.control.core.assembly import Assembly
from eplb_service.control.core.errors import AlreadyConnectedError, ConflictError
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.placement import PlacementError
from eplb_service.planner.topology import Topology
from eplb_service.wire.hello import Hello, Shape

_RANKS_NAMED = 8


@dataclass(frozen=True)
class Member:
    """One rank as it last reported.

    Parameters
    ----------
    epoch, digest
        Version that it serves.
    connected
        Whether its stream is alive.
    step
        Step that it is at.
    error
        Why it no longer takes part; empty while all is well.
    dropped_steps
        Steps that its agent had to drop since its Hello.
    highest_term
        Highest leader term of which it had heard when it said Hello.
    staging_bytes, ring_bytes
        That it holds for experts that wait for their commit, and in which its layers count heat; ``None`` where it has
        not reported them.
    """

    rank: int
    node: str
    token_group: int
    epoch: int
    digest: int
    connected: bool = True
    step: int = 0
    error: str = ""
    agent_version: str = ""
    dropped_steps: int = 0
    highest_term: int = 0
    staging_bytes: int | None = None
    ring_bytes: int | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest that the rank serves."""
        return self.epoch, self.digest


@dataclass(frozen=True)
class Group:
    """One forming of an EP group, a value: who has come, and what they serve once all have.

    Parameters
    ----------
    group_id, shape
        What all its ranks agree on.
    members
        Ranks that have ever come, by rank.
    waiting
        Their Hellos until all have come.
    live
        What they serve together, once all have come.
    """

    group_id: str
    shape: Shape
    members: Mapping[int, Member] = field(default_factory=dict)
    waiting: Mapping[int, Hello] = field(default_factory=dict)
    live: LivePlacement | None = None

    @property
    def forming(self) -> tuple[str, Shape]:
        """What distinguishes one forming of the group from another."""
        return self.group_id, self.shape

    @property
    def connected(self) -> list[Member]:
        """Ranks whose stream is alive."""
        return [member for member in self.members.values() if member.connected]

    @property
    def missing(self) -> list[int]:
        """Ranks without a stream, ascending."""
        here = {member.rank for member in self.connected}
        return [rank for rank in range(self.shape.ranks) if rank not in here]

    @property
    def out_of_step(self) -> list[int]:
        """Connected ranks that serve another version than the whole."""
        if self.live is None:
            return []
        version = (self.live.epoch, self.live.digest)
        return [member.rank for member in self.connected if member.version != version]

    @property
    def moved_on(self) -> int | None:
        """A rank that has switched since its Hello while others were still to come, so that they would not agree."""
        for rank, hello in self.waiting.items():
            if self.members[rank].version != hello.version:
                return rank
        return None

    @property
    def highest_term(self) -> int:
        """Highest leader term that any of its ranks has reported; they refuse plans of a lower one."""
        return max((member.highest_term for member in self.members.values()), default=0)

    @property
    def topology(self) -> Topology:
        """Nodes numbered in order of rank, token groups as reported; needs every rank to have come once."""
        members = [self.members[rank] for rank in range(self.shape.ranks)]
        numbers = {
            node: number for number, node in enumerate(dict.fromkeys(member.node for member in members))
        }
        return Topology(
            np.array([numbers[member.node] for member in members], dtype=np.int32),
            np.array([member.token_group for member in members], dtype=np.int32),
            self.shape.bytes_per_expert,
            self.shape.rank_bound,
        )

    def yields_to(self, hello: Hello, overdue: bool = False) -> bool:
        """Whether ``hello`` opens another group in place of this one.

        That is so where nobody is left of this one, or the ranks that it waits for are ``overdue``.

        Raises ``AlreadyConnectedError`` where this rank is still connected, ``ConflictError`` where another is.
        """
        if overdue and hello.group_id != self.group_id:
            return True
        if hello.rank in (member.rank for member in self.connected):
            raise AlreadyConnectedError(
                f"rank {hello.rank} is connected already; give each agent its own rank, and each model instance "
                "its own deployment"
            )
        if (hello.group_id, hello.shape) == self.forming:
            return False
        if self.connected and hello.group_id != self.group_id:
            here = rank_list([member.rank for member in self.connected])
            raise ConflictError(
                f"rank {hello.rank} belongs to another forming of the group than {here}, still connected; "
                "it is taken in once those are gone"
            )
        return not self.connected

    def completed_by(self, hello: Hello) -> Mapping[int, Hello] | None:
        """All ranks' Hellos, where ``hello`` is the last that is missing; ``None`` where it is not."""
        if (
            self.live is not None
            or (hello.group_id, hello.shape) != self.forming
            or hello.rank in self.waiting
        ):
            return None
        hellos = {**self.waiting, hello.rank: hello}
        return hellos if len(hellos) == self.shape.ranks else None

    def joined(self, hello: Hello, assembly: Assembly | None = None) -> Group:
        """The group with this rank in it.

        Where it is the last, what all serve is taken from ``assembly`` if that is of the same Hellos.

        Raises
        ------
        ConflictError
            The rank reports something that contradicts the others.
        """
        if hello.shape != self.shape:
            raise ConflictError(f"rank {hello.rank} {_difference(hello.shape, self.shape)}")
        group = self
        if self.live is not None and hello.version != (self.live.epoch, self.live.digest):
            if self.connected:
                raise ConflictError(_other_version(hello, self.live.epoch, self.live.digest))
            # Nobody is left who served what was known: the ranks hold the truth, so start over from theirs.
            group = self.without_live()
        group = (
            group._assembled_with(hello, assembly)
            if group.live is None
            else group._rejoined(hello, group.live)
        )
        known = self.members.get(hello.rank)
        member = Member(
            hello.rank,
            hello.node,
            hello.token_group,
            hello.epoch,
            hello.digest,
            step=known.step if known else 0,
            agent_version=hello.agent_version,
            highest_term=hello.highest_term,
        )
        return replace(group, members={**self.members, hello.rank: member})

    def left(self, rank: int) -> Group:
        """The rank's stream has ended; what it reported may be out of date when it returns."""
        waiting = {other: hello for other, hello in self.waiting.items() if other != rank}
        return replace(self.with_member(rank, connected=False), waiting=waiting)

    def with_member(self, rank: int, **changes: Any) -> Group:
        """The group with some fields of one member changed."""
        # As `replace`, in half its time: this is done for every report.
        member = Member(**{**vars(self.members[rank]), **changes})
        return Group(**{**vars(self), "members": {**self.members, rank: member}})

    def without_live(self) -> Group:
        """What was known no longer holds; every rank has to say Hello again."""
        return replace(self, live=None)

    def _assembled_with(self, hello: Hello, assembly: Assembly | None) -> Group:
        other = next(iter(self.waiting.values()), None)
        if other is not None:
            _check_same_version(hello, other)
        waiting = {**self.waiting, hello.rank: hello}
        if len(waiting) == self.shape.ranks:
            if assembly is None or not assembly.is_of(waiting):
                assembly = Assembly.of(waiting)
            return replace(self, live=assembly.result(), waiting={})
        return replace(self, waiting=waiting)

    def _rejoined(self, hello: Hello, live: LivePlacement) -> Group:
        known_LS = live.placement.phy2log_LRS[:, hello.rank]
        differs = np.flatnonzero((known_LS != hello.slots_LS).any(axis=1))
        if differs.size:
            raise ConflictError(
                f"rank {hello.rank} holds other experts in layer {differs[0]} than its digest says"
            )
        if np.array_equal(live.log2phy_of(hello.rank), hello.log2phy_LE):
            return self
        try:
            return replace(self, live=live.with_table(hello.rank, hello.log2phy_LE))
        except PlacementError as error:
            raise ConflictError(str(error)) from error


def _check_same_version(hello: Hello, other: Hello) -> None:
    if hello.version != other.version:
        raise ConflictError(_other_version(hello, other.epoch, other.digest))
    if hello.layer_epochs != other.layer_epochs:
        raise ConflictError(f"rank {hello.rank} and rank {other.rank} say different epochs of their layers")


def _other_version(hello: Hello, epoch: int, digest: int) -> str:
    return (
        f"rank {hello.rank} serves epoch {hello.epoch} digest {hello.digest:#x}, "
        f"the other ranks epoch {epoch} digest {digest:#x}"
    )


def _difference(found: Shape, known: Shape) -> str:
    names = ("ranks", "layers", "experts", "slots", "bytes_per_expert", "width", "rank_bound")
    parts = [
        f"{name} {getattr(found, name)} instead of {getattr(known, name)}"
        for name in names
        if getattr(found, name) != getattr(known, name)
    ]
    return f"has another shape than the other ranks: {', '.join(parts)}"


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, or the first eight and how many more."""
    named = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED])
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
