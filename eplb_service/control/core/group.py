"""One EP group: its ranks must agree, only all of them make a placement, and some are refused or waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from eplb_core.planner.topology import Topology
from eplb_core.wire.agent import Hello, Shape
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.errors import AlreadyConnectedError, ConflictError

_RANKS_NAMED = 8
_REFUSALS_KEPT = 16
_REFUSAL_SECONDS = 60.0
"""Time for which a refusal is a problem: an agent that has a place here tries again within seconds."""
_FORMING_SECONDS = 60.0
"""Time that ranks may wait for the others of their forming before another may take their place."""

Assembled: TypeAlias = tuple[Mapping[int, Hello], DeployedLayout | ConflictError]
"""Hellos that waited for the last one, and what all ranks serve together or why that is not one placement."""


@dataclass(frozen=True)
class Member:
    """One rank as it last reported; what is ``None`` is not known.

    Ranks of one token group see the same tokens; epoch and digest are of the placement that it serves; the highest
    leader term is the one of which it had heard when it said Hello. ``staging_bytes`` and ``ring_bytes`` are held for
    experts that wait for their commit, and in which layers count heat.
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
    """One forming of an EP group (immutable): who has come, and what they serve once all have.

    ``members`` are the ranks that have ever come, ``waiting`` their Hellos until all have; ``live`` is the placement
    that they serve together from then on.
    """

    group_id: str
    shape: Shape
    members: Mapping[int, Member] = field(default_factory=dict)
    waiting: Mapping[int, Hello] = field(default_factory=dict)
    live: DeployedLayout | None = None

    @property
    def forming(self) -> tuple[str, Shape]:
        """Distinguishes one forming of the group from another."""
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
        return [member.rank for member in self.connected if member.version != self.live.version]

    @property
    def moved_on(self) -> int | None:
        """A rank that has switched since its Hello while others were still to come, so that they would not agree."""
        waiting = self.waiting.items()
        return next((rank for rank, hello in waiting if self.members[rank].version != hello.version), None)

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
            members[0].device if len({member.device for member in members}) == 1 else "",
        )

    def yields_to(self, hello: Hello, overdue: bool = False) -> bool:
        """Return whether ``hello`` opens another group: nobody is left of this one, or its last ranks are ``overdue``.

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

    def is_completed_by(self, hello: Hello) -> bool:
        """Return whether ``hello`` is the last that is missing."""
        return (
            self.live is None
            and (hello.group_id, hello.shape) == self.forming
            and hello.rank not in self.waiting
            and len(self.waiting) + 1 == self.shape.ranks
        )

    def assembled(self, hello: Hello) -> Assembled:
        """Put together what all ranks serve, ``hello`` being the last; with many ranks beside the event loop."""
        try:
            return self.waiting, DeployedLayout.assembled({**self.waiting, hello.rank: hello})
        except ConflictError as error:
            return self.waiting, error

    def joined(self, hello: Hello, assembled: Assembled | None = None) -> Group:
        """Return the group with this rank in it; raises ``ConflictError`` where it contradicts the others.

        Where it is the last, what all serve is taken from ``assembled`` if the same ranks still wait.
        """
        if hello.shape != self.shape:
            raise ConflictError(f"rank {hello.rank} {_difference(hello.shape, self.shape)}")
        group = self
        if self.live is not None and hello.version != self.live.version:
            if self.connected:
                raise ConflictError(_other_version(hello, *self.live.version))
            # Nobody is left who served what was known: the ranks hold the truth, so start over from theirs.
            group = self.without_live()
        if group.live is None:
            group = group._waiting_with(hello, assembled)
        else:
            _check_rejoining(hello, group.live)
        said = ("rank", "node", "epoch", "digest", "token_group", "agent_version", "highest_term", "device")
        step = self.members[hello.rank].step if hello.rank in self.members else 0
        member = Member(**{name: getattr(hello, name) for name in said}, step=step)
        return replace(group, members={**self.members, hello.rank: member})

    def left(self, rank: int) -> Group:
        """End the rank's stream; what it reported may be out of date when it returns."""
        waiting = {other: hello for other, hello in self.waiting.items() if other != rank}
        return replace(self.with_member(rank, connected=False), waiting=waiting)

    def with_member(self, rank: int, **changes: Any) -> Group:
        """Return the group with some fields of one member changed."""
        # As `replace`, in half its time: this is done for every report.
        member = Member(**{**vars(self.members[rank]), **changes})
        return Group(**{**vars(self), "members": {**self.members, rank: member}})

    def without_live(self) -> Group:
        """Return the group knowing nothing of its placement; every rank has to say Hello again."""
        return replace(self, live=None)

    def _waiting_with(self, hello: Hello, assembled: Assembled | None) -> Group:
        other = next(iter(self.waiting.values()), None)
        if other is not None and hello.version != other.version:
            raise ConflictError(_other_version(hello, *other.version))
        if other is not None and hello.layer_epochs != other.layer_epochs:
            raise ConflictError(
                f"rank {hello.rank} and rank {other.rank} say different epochs of their layers"
            )
        waiting = {**self.waiting, hello.rank: hello}
        if len(waiting) < self.shape.ranks:
            return replace(self, waiting=waiting)
        if assembled is None or assembled[0] is not self.waiting:
            assembled = self.assembled(hello)
        _, live = assembled
        if isinstance(live, ConflictError):
            raise live
        return replace(self, live=live, waiting={})


@dataclass(frozen=True)
class Attendance:
    """Ranks refused, waited for and gone, as only the clock shows (immutable).

    ``refused`` has by rank why it was refused, and the first look at the clock since; it is forgotten where it is not
    repeated. Since ``forming_since`` some ranks are connected and others have never come; once that is overdue, another
    forming of the group may take their place. Since ``departed_since`` no rank is connected.
    """

    refused: Mapping[int, tuple[str, float | None]] = field(default_factory=dict)
    forming_since: float | None = None
    forming_overdue: bool = False
    departed_since: float | None = None

    def turned_away(self, rank: int, reason: str) -> Attendance:
        """Note that a rank was refused; only the last refusals are kept."""
        refused = {**self.refused, rank: (reason, None)}
        return replace(self, refused=dict(list(refused.items())[-_REFUSALS_KEPT:]))

    def taken_in(self, rank: int) -> Attendance:
        """Note that a rank is refused no more."""
        return replace(self, refused={other: why for other, why in self.refused.items() if other != rank})

    def after(self, now: float, *, connected: bool, waiting: bool) -> Attendance:
        """Look at the clock, in seconds; ``waiting``: ranks are here, and others of their forming have never come."""
        refused = {
            rank: (reason, now if since is None else since)
            for rank, (reason, since) in self.refused.items()
            if since is None or now - since < _REFUSAL_SECONDS
        }
        departed = None if connected else now if self.departed_since is None else self.departed_since
        if not waiting:
            return Attendance(refused, departed_since=departed)
        since = now if self.forming_since is None else self.forming_since
        overdue = self.forming_since is not None and now - since >= _FORMING_SECONDS
        return Attendance(refused, since, overdue, departed)


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 2``, or the first eight and how many more."""
    named = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED])
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


def _check_rejoining(hello: Hello, live: DeployedLayout) -> None:
    for layer, (slots_S, table_E) in enumerate(zip(hello.slots_LS, hello.log2phy_LE, strict=True)):
        if not np.array_equal(live.placement.phy2log_LRS[layer, hello.rank], slots_S):
            raise ConflictError(
                f"rank {hello.rank} holds other experts in layer {layer} than its digest says"
            )
        if not np.array_equal(live.tables_L[layer][hello.rank], table_E):
            raise ConflictError(f"rank {hello.rank} has another log2phy in layer {layer} than it was given")


def _other_version(hello: Hello, epoch: int, digest: int) -> str:
    return (
        f"rank {hello.rank} serves epoch {hello.epoch} digest {hello.digest:#x}, "
        f"the other ranks epoch {epoch} digest {digest:#x}"
    )


def _difference(found: Shape, known: Shape) -> str:
    parts = [
        f"{name} {value} instead of {getattr(known, name)}"
        for name, value in vars(found).items()
        if value != getattr(known, name)
    ]
    return f"has another shape than the other ranks: {', '.join(parts)}"
