"""What can happen to the streams of an explored service: they begin, end, and are noticed to have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eplb_service.control.core.errors import RefusedError
from eplb_service.wire.hello import Hello
from tests.control.core.explored_crew import Crew
from tests.control.core.explored_state import State
from tests.control.core.explored_truth import RANKS_BY_FORMING, hello_at, stranger_at
from tests.exploring import Event, must


class StreamsWorld(State):
    """A state in which ranks connect and go, services start again, and groups are formed."""

    def stream_events(self) -> Iterator[Event]:
        """Those that this state admits."""
        for rank, one in enumerate(self.crew.ranks):
            if one.service is None:
                for service, term in enumerate(self.terms):
                    if term >= one.term:
                        yield ("connect", rank, service)
                    elif self.faults.strays:
                        yield ("stray", rank, service)
            elif self.faults.cuts or self.has_to_end(rank):
                yield ("cut", rank)
            if self.faults.deaf and rank in self.ending:
                yield ("deaf", rank)
        for service, rank, forming in self.dead_streams:
            yield ("notice", service, rank, forming)
        for service, deployment in enumerate(self.services):
            if self.faults.restarts:
                yield ("restart", service)
            if self.faults.squats:
                yield ("squat", service)
            if self.faults.orders and deployment.outdated is not None:
                yield ("lead", service)
            if service in self.squatted and not deployment.attendance.forming_overdue:
                yield ("wait", service)
        if self.faults.reforms and self.crew.version.forming + 1 < len(RANKS_BY_FORMING):
            yield ("reform",)

    def has_to_end(self, rank: int) -> bool:
        """Whether the rank's stream ends without a fault: it was asked to come again, or its service is outdated."""
        service = self.crew.ranks[rank].service
        return rank in self.ending or (service is not None and self.terms[service] < max(self.terms))

    def _connect(self, rank: int, service: int) -> None:
        known = self.crew.ranks[rank].term
        if not self._introduce(replace(hello_at(self.crew.version, rank), highest_term=known), service):
            return
        term = max(self.crew.ranks[rank].term, self.terms[service])
        self.crew = self.crew.with_rank(rank, service=service, term=term, shown=self.crew.version, said=None)

    def _introduce(self, hello: Hello, service: int) -> bool:
        """Whether the service takes it in; another forming's streams end as those of this one begin."""
        deployment = self.services[service]
        group, heard = deployment.group, self._stream_of(service, hello)
        if heard and deployment.renews(hello):
            self._drop_stream(service, hello.rank)
            deployment.leave(hello.rank)
        try:
            deployment.hello(hello)
        except RefusedError:
            return False
        finally:
            if deployment.heat is not None:
                # Heat is always there: what is explored is not how it is counted.
                deployment.heat.assembled = 1
        if group is not None and deployment.group is not None and deployment.group.forming != group.forming:
            self._drop_streams(service)
        return True

    def _stream_of(self, service: int, hello: Hello) -> bool:
        """Whether the service takes the rank to have a stream."""
        return hello.rank in {member.rank for member in self.services[service].connected}

    def _drop_stream(self, service: int, rank: int) -> None:
        """The service ends what it takes for the rank's stream, and forgets it."""
        self.dead_streams = frozenset(one for one in self.dead_streams if one[:2] != (service, rank))
        if rank < len(self.crew.ranks) and self.crew.ranks[rank].service == service:
            self.ending -= {rank}
            self.crew = self.crew.with_rank(rank, service=None, coming=None, shown=None, said=None)

    def _drop_streams(self, service: int) -> None:
        """The same, with all of them."""
        self.squatted -= {service}
        for rank in range(max(RANKS_BY_FORMING)):
            self._drop_stream(service, rank)

    def _squat(self, service: int) -> None:
        """A stranger says Hello as rank 0; it must not push out ranks that are there, or have only just come."""
        self.faults = self.faults._replace(squats=self.faults.squats - 1)
        deployment = self.services[service]
        stranger, overdue = stranger_at(0), deployment.attendance.forming_overdue
        here = [rank for rank, one in enumerate(self.crew.ranks) if one.service == service]
        if self._introduce(stranger, service):
            must(not here or overdue, "a stranger took the place of ranks that are there")
            self.squatted |= {service}
        else:
            still = [rank for rank, one in enumerate(self.crew.ranks) if one.service == service]
            must(here == still, "a stranger ended a rank's stream")

    def _wait(self, service: int) -> None:
        """So much time passes that who waits for others of its forming waits in vain."""
        for seconds in (0.0, 1000.0):
            self.services[service].tick(seconds)

    def _lead(self, service: int) -> None:
        """An operator has a service lead that is outdated; its streams end, so that the ranks hear of its term."""
        self.faults = self.faults._replace(orders=self.faults.orders - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service].leader_term = self.terms[service]
        self.ending |= {rank for rank, one in enumerate(self.crew.ranks) if one.service == service}

    def _stray(self, rank: int, service: int) -> None:
        self.faults = self.faults._replace(strays=self.faults.strays - 1)
        self._connect(rank, service)

    def _cut(self, rank: int) -> None:
        if not self.has_to_end(rank):
            self.faults = self.faults._replace(cuts=self.faults.cuts - 1)
        self.end_stream(rank)

    def _deaf(self, rank: int) -> None:
        self.faults = self.faults._replace(deaf=self.faults.deaf - 1)
        self.ending -= {rank}

    def end_stream(self, rank: int) -> None:
        """It is over on the rank's side; the service has yet to notice."""
        service = self.crew.ranks[rank].service
        assert service is not None
        self.dead_streams |= {(service, rank, self.crew.version.forming)}
        self.ending -= {rank}
        self.crew = self.crew.with_rank(rank, service=None, coming=None, shown=None, said=None)

    def _notice(self, service: int, rank: int, forming: int) -> None:
        self.dead_streams -= {(service, rank, forming)}
        self.services[service].leave(rank)

    def _restart(self, service: int) -> None:
        self.faults = self.faults._replace(restarts=self.faults.restarts - 1)
        self.terms[service] = max(self.terms) + 1
        self.services[service] = self.started(self.terms[service])
        self.squatted -= {service}
        self.open_plans[service] = None
        for rank, one in enumerate(self.crew.ranks):
            if one.service == service:
                self.end_stream(rank)
        # The service that would have noticed is gone.
        self.dead_streams = frozenset(stream for stream in self.dead_streams if stream[0] != service)

    def _reform(self) -> None:
        self.faults = self.faults._replace(reforms=self.faults.reforms - 1)
        for rank, one in enumerate(self.crew.ranks):
            if one.service is not None:
                self.end_stream(rank)
        self.gone = (*self.gone, self.crew.version)
        self.crew = Crew.formed(self.crew.version.forming + 1)
