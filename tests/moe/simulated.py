"""Ranks as threads in this process. They start in milliseconds and use the layer's own exchanges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from eplb_lab.layer.rank_group import RankGroup

_here = threading.local()


class Exchange:
    """Rendezvous for one group's threads. If one thread fails, the others fail as well instead of waiting."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20.0)
        self.parts: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self._within: dict[tuple[str, int], Exchange] = {}
        self._lock = threading.Lock()

    def within(self, kind: str, number: int, ranks: int) -> Exchange:
        """Return the exchange of a subset of the ranks. It is the same object on each of them."""
        with self._lock:
            return self._within.setdefault((kind, number), Exchange(ranks))

    def abort(self) -> None:
        """Make every waiting thread fail."""
        self.barrier.abort()
        for exchange in self._within.values():
            exchange.abort()


class SimulatedGroup(RankGroup):
    """One rank's view of the group that an ``Exchange`` connects."""

    def __init__(self, exchange: Exchange, rank: int, name: str = "simulated") -> None:
        super().__init__(None)
        self._exchange = exchange
        self._name = name
        self.rank = rank
        self.size = len(exchange.parts)
        vars(_here).setdefault("groups", {})[name] = self

    @property
    def name(self) -> str:
        return self._name

    @classmethod
    def named(cls, name: str) -> RankGroup:
        """Replacement for ``RankGroup.named``, for operators that look up their group by name."""
        group: RankGroup = _here.groups[name] if name else RankGroup(None)
        return group

    def twin(self, name: str) -> SimulatedGroup:
        """Return a second group of the same ranks."""
        return SimulatedGroup(self._exchange.within(name, 0, self.size), self.rank, name)

    def grid(self, tp: int) -> tuple[SimulatedGroup, SimulatedGroup]:
        """Return this rank's data-parallel and tensor-parallel groups, if ``tp`` consecutive ranks share tokens."""
        exchange = self._exchange
        rank = self.rank
        return (
            SimulatedGroup(exchange.within("dp", rank % tp, self.size // tp), rank // tp, "dp"),
            SimulatedGroup(exchange.within("tp", rank // tp, tp), rank % tp, "tp"),
        )

    def start_all_to_all(
        self, rows_NX: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], torch.Tensor]:
        assert sum(sent) == rows_NX.shape[0]
        exchange = self._exchange
        exchange.parts[self.rank] = list(rows_NX.clone().split(sent))
        exchange.barrier.wait()
        arrived = [exchange.parts[source][self.rank] for source in range(self.size)]
        exchange.barrier.wait()
        assert [part.shape[0] for part in arrived] == received
        arrived_NX = torch.cat(arrived)
        sending = [rows_NX]

        def wait() -> torch.Tensor:
            sending.clear()
            return arrived_NX

        return wait


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Make operators find simulated groups by name, and limit torch to one thread.

    The ranks are threads already, so torch's own threads would only wait.
    """
    threads = torch.get_num_threads()
    named = RankGroup.named
    torch.set_num_threads(1)
    RankGroup.named = SimulatedGroup.named  # type: ignore[method-assign]
    try:
        yield
    finally:
        RankGroup.named = named  # type: ignore[method-assign]
        torch.set_num_threads(threads)


def run_simulated(ranks: int, function: Callable[[SimulatedGroup], Any]) -> list[Any]:
    """Run ``function(group)`` on every rank of a simulated group.

    Return the results in rank order, or raise the first failure.
    """
    exchange = Exchange(ranks)
    failures: list[BaseException] = []

    def one(rank: int) -> Any:
        try:
            return function(SimulatedGroup(exchange, rank))
        except threading.BrokenBarrierError:
            return None
        except BaseException as error:
            failures.append(error)
            exchange.abort()
            return None

    with one_thread_each(), ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one, range(ranks)))
    if failures:
        raise failures[0]
    assert not exchange.barrier.broken, "one rank ran fewer exchanges than the other ranks"
    return results
