"""The ranks' side of an explored service: what they hold, what they have yet to say, and what they serve.

How ranks switch together is explored by itself, with the real machine (``tests/swap``). What of it matters to a service
is here: all ranks commit a layer at once, if all hold the plan; they drop a plan together, at any moment; what each
says of it waits in its outbox, statuses before heat, and may be lost on its way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from eplb_service.wire.status import PlanState
from tests.control.core.explored_truth import RANKS_BY_FORMING, Given, Version, live_at, offer_of


class Status(NamedTuple):
    """What a rank reports of a plan: which plan, what, and the version that was served when it was said."""

    given: Given
    state: int
    layer: int
    version: Version


class Rank(NamedTuple):
    """One rank's agent."""

    service: int | None = None
    """The service that its stream leads to."""
    term: int = 0
    """The highest leader term that it has heard of."""
    held: Given | None = None
    coming: Given | None = None
    """A plan on its way here, on the present stream."""
    statuses: tuple[Status, ...] = ()
    said: Status | None = None
    """The last status that was received, for one that comes twice."""
    shown: Version | None = None
    """The newest version that the present stream has reported."""


class Crew(NamedTuple):
    """All ranks of the present forming of the group."""

    version: Version
    ranks: tuple[Rank, ...]

    @classmethod
    def formed(cls, forming: int, term: int = 0) -> Crew:
        """A group that has just met; its agents are new, and know of no service."""
        return cls(Version(forming, ()), (Rank(term=term),) * RANKS_BY_FORMING[forming])

    def with_rank(self, rank: int, **changes: Any) -> Crew:
        """One rank changed."""
        return self._replace(
            ranks=(*self.ranks[:rank], self.ranks[rank]._replace(**changes), *self.ranks[rank + 1 :])
        )

    def hears(self, rank: int) -> Crew:
        """The plan on its way arrives: it is taken, or refused with a status."""
        one = self.ranks[rank]
        given = one.coming
        assert given is not None
        crew = self.with_rank(rank, coming=None)
        if one.held == given:
            return crew
        offer, live = offer_of(given), live_at(self.version)
        fits = (
            given.forming == self.version.forming
            and (offer.base_epoch, offer.base_digest) == (live.epoch, live.digest)
            and given.term >= one.term
            and one.held is None
        )
        if fits:
            return crew.with_rank(rank, held=given, term=given.term)
        return crew.says(rank, given, PlanState.REFUSED)

    @property
    def may_commit(self) -> bool:
        """Whether all hold one plan."""
        held = {rank.held for rank in self.ranks}
        return len(held) == 1 and None not in held

    def commits(self) -> Crew:
        """All switch the next layer of the plan that all hold."""
        given = self.ranks[0].held
        assert given is not None
        milestones = offer_of(given).milestones
        index = len(self.version.path) - len(given.path)
        crew = self._replace(version=Version(self.version.forming, (*self.version.path, given)))
        for rank in range(len(self.ranks)):
            crew = crew.says(rank, given, PlanState.COMMITTED, milestones[index].update.layer)
            if index + 1 == len(milestones):
                crew = crew.with_rank(rank, held=None)
        return crew

    def drops(self) -> Crew:
        """Whatever is held is given up by all: some rank voted so, or a deadline has passed."""
        crew = self
        for rank, one in enumerate(self.ranks):
            if one.held is not None:
                crew = crew.says(rank, one.held, PlanState.ABORTED).with_rank(rank, held=None)
        return crew

    def says(self, rank: int, given: Given, state: int, layer: int = 0) -> Crew:
        """A status goes into the rank's outbox."""
        status = Status(given, state, layer, self.version)
        return self.with_rank(rank, statuses=(*self.ranks[rank].statuses, status))
