"""What can happen to the streams of an explored service: they begin, end, and are noticed to have ended."""

from __future__ import annotations

from collections.abc import Iterator

from eplb_service.control.core.errors import RefusedError
from tests.control.core.explored_crew import Crew
from tests.control.core.explored_state import State
from tests.control.core.explored_truth import RANKS_BY_FORMING, hello_at
from tests.exploring import Event


class StreamsWorld(State):
    """A state in which ranks connect and go, services start anew, and groups are formed."""

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
        if self.faults.restarts:
            for service in range(len(self.services)):
                yield ("restart", service)
        if self.faults.reforms and self.crew.version.forming + 1 < len(RANKS_BY_FORMING):
            yield ("reform",)

    def has_to_end(self, rank: int) -> bool:
        """Whether the rank's stream ends without a fault: it was asked to come again, or its service is outdated."""
        service = self.crew.ranks[rank].service
        return rank in self.ending or (service is not None and self.terms[service] < max(self.terms))

    def _connect(self, rank: int, service: int) -> None:
        hello, deployment = hello_at(self.crew.version, rank), self.services[service]
        try:
            deployment.hello(hello)
        except RefusedError:
            return
        finally:
            if deployment.heat is not None:
                # Heat is always there: what is explored is not how it is counted.
                deployment.heat.assembled = 1
        term = max(self.crew.ranks[rank].term, self.terms[service])
        self.crew = self.crew.with_rank(rank, service=service, term=term, shown=self.crew.version, said=None)

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
        self.services[service] = self.started()
        self.terms[service] = max(self.terms) + 1
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
