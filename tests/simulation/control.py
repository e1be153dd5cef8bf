"""A service that gives random plans, one after another, over the real streams of the agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
from pydantic import PrivateAttr

from eplb_service.placement import Placement, default_log2phy
from eplb_service.wire.agent import Heartbeat, PlanState, PlanStatus, Welcome, decode_hello
from eplb_service.wire.codec import decode, encode
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.plan import RankLayer, RankPlan, SharedPlan, table_digest
from tests.simulation.network import Network
from tests.simulation.scheduler import Process
from worker_agent.settings import AgentSettings

NAME = "service"
_REST_SECONDS = 2.0
"""Between the end of a plan and the next."""
_PATIENCE_SECONDS = 120.0


class Lost(grpc.RpcError):
    def details(self) -> str:
        return "the stream is lost"


class SimulatedSettings(AgentSettings):
    """An agent's settings whose channel to the service is the simulation's."""

    _opens: Callable[[], Any] = PrivateAttr()

    @property
    def security(self) -> Any:
        return self

    def open(self, _: str) -> Any:
        return self._opens()


class Channel:
    """A channel of one rank to whoever serves, as the stubs of gRPC use it."""

    def __init__(self, process: Process, network: Network, service: Callable[[], Any]) -> None:
        self._process, self._network, self._service = process, network, service

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stream_stream(self, *_: object, **__: object) -> Any:
        return lambda requests, metadata: Call(self._process, self._network, self._service(), requests)


class Call:
    """One stream: requests are pulled on a thread of their own, responses wait in a queue."""

    def __init__(self, process: Process, network: Network, service: Any, requests: Iterator[Any]) -> None:
        self._process, self._network, self._service = process, network, service
        self._responses = process.queue()
        self._requests = requests
        self._last = 0.0
        self.over = False
        process.on_end.append(self.end)
        if self._reachable():
            process.spawn("grpc", self._pull)
        else:
            process.later(0.1, self.cancel)

    def __iter__(self) -> Call:
        return self

    def __next__(self) -> Any:
        response = self._responses.get()
        if response is None:
            raise Lost
        return agent_pb2.ConnectResponse.FromString(response)

    def cancel(self) -> None:
        self.end()

    def end(self) -> None:
        """End on both sides."""
        if not self.over:
            self.over = True
            self._responses.put(None)
            if self._service is not None:
                self._service.ended(self)

    def respond(self, response: bytes) -> None:
        """Send to the rank, in order."""
        self._carry(lambda: None if self.over else self._responses.put(response))

    def _pull(self) -> None:
        for request in self._requests:
            if self.over:
                return
            data = request.SerializeToString()
            self._carry(lambda data=data: None if self.over else self._service.heard(self, data))  # type: ignore[misc]

    def _carry(self, deliver: Callable[[], object]) -> None:
        scheduler = self._network.scheduler
        if not self._reachable():
            self.end()
            return
        self._last = max(self._last, scheduler.now + self._network.latency())
        scheduler.at(self._last, deliver)

    def _reachable(self) -> bool:
        service = self._service
        cut = self._network.is_cut(self._process.name, NAME)
        return service is not None and service.process.alive and not cut


class Giver:
    """Gives a plan whenever all ranks serve one placement and hold none; ``done`` counts those carried out whole."""

    def __init__(self, process: Process, ranks: int, term: int, first_plan: int) -> None:
        self.process = process
        self.done = 0
        self.plan_id = first_plan
        self._ranks = ranks
        self._term = term
        self._calls: dict[Call, int] = {}
        self._at: dict[int, tuple[int, int]] = {}
        self._hellos: dict[int, Any] = {}
        self._known: dict[int, Placement] = {}
        self._waiting: set[int] = set()
        self._target = 0
        self._ends_at = 0.0
        self.withholds = 0.0
        process.spawn("plans", self._give)
        process.on_end.append(self._gone)

    def heard(self, call: Call, data: bytes) -> None:
        """Take a request."""
        request = agent_pb2.ConnectRequest.FromString(data)
        kind = request.WhichOneof("message")
        if kind == "hello":
            hello = decode_hello(request.hello)
            for other in [one for one, rank in self._calls.items() if rank == hello.rank]:
                other.end()
            self._calls[call] = hello.rank
            self._hellos[hello.rank] = hello
            self._at[hello.rank] = (hello.epoch, hello.digest)
            call.respond(
                agent_pb2.ConnectResponse(
                    welcome=encode(Welcome("0", self._term, 16, 2.0))
                ).SerializeToString()
            )
        elif kind == "heartbeat":
            beat = decode(Heartbeat, request.heartbeat)
            self._at[self._calls[call]] = (beat.epoch, beat.digest)
        elif kind == "plan_status":
            self._status(self._calls[call], decode(PlanStatus, request.plan_status))

    def ended(self, call: Call) -> None:
        """A stream is over."""
        self._calls.pop(call, None)

    def _status(self, rank: int, status: PlanStatus) -> None:
        if status.state in (PlanState.COMMITTED, PlanState.ABORTED):
            self._at[rank] = (status.epoch, status.digest)
        if status.plan_id != self.plan_id:
            return
        self.process.scheduler.note(
            NAME,
            f"rank {rank}: plan {status.plan_id} layer {status.layer} {status.state.name} {status.reason}",
        )
        if status.state in (PlanState.ABORTED, PlanState.REFUSED):
            self._waiting.clear()
            self._target = 0
        if status.state is PlanState.COMMITTED and status.digest == self._target and rank in self._waiting:
            self._waiting.discard(rank)
            if not self._waiting:
                self.done += 1
                self.process.scheduler.note(NAME, f"plan {self.plan_id} is carried out")

    def _give(self) -> None:
        while True:
            self.process.sleep(_REST_SECONDS)
            waits = self._waiting and self.process.now() < self._ends_at
            everywhere = set(self._at.values())
            if waits or len(self._calls) < self._ranks or len(everywhere) != 1:
                continue
            if set(self._calls.values()) == set(range(self._ranks)):
                self._offer(*everywhere.pop())

    def _offer(self, epoch: int, digest: int) -> None:
        placement = self._known.get(digest)
        if placement is None:
            if {hello.digest for hello in self._hellos.values()} != {digest}:
                for call in list(self._calls):
                    call.end()
                return
            slots = np.stack([self._hellos[rank].slots_LS for rank in range(self._ranks)], axis=1)
            placement = Placement(slots, self._hellos[0].shape.experts)
        random = self.process.scheduler.random
        self.plan_id += 1
        layers, tables, after = [], [], placement
        for layer in random.sample(range(placement.layers), random.randint(1, placement.layers)):
            new_RS, moves_M5 = changed(placement.phy2log_LRS[layer], placement.experts, random)
            tables_RE = default_log2phy(new_RS, placement.experts)
            digests = tuple(table_digest(row) for row in tables_RE)
            layers.append(RankLayer(layer, new_RS, tables_RE[0], digests, moves_M5))
            tables.append(tables_RE)
            slots = after.phy2log_LRS.copy()
            slots[layer] = new_RS
            after = Placement(slots, placement.experts)
            self._known[after.digest()] = after
        plan = SharedPlan(RankPlan.of(self.plan_id, self._term, epoch, digest, tuple(layers)), tables)
        self._target = after.digest()
        self._waiting = set(range(self._ranks))
        self._ends_at = self.process.now() + _PATIENCE_SECONDS
        self.process.scheduler.note(
            NAME, f"plan {self.plan_id} of layers {[one.layer for one in layers]} goes out"
        )
        for call, rank in sorted(self._calls.items(), key=lambda item: item[1]):
            if random.random() >= self.withholds:
                self.process.later(
                    random.random() * 0.5, lambda call=call, rank=rank: call.respond(plan.response(rank))
                )  # type: ignore[misc]

    def _gone(self) -> None:
        for call in list(self._calls):
            call.end()


def changed(old_RS: Any, experts: int, random: Any) -> tuple[Any, Any]:
    """A neighbour of a layer, int32 ``[R, S]``, and its moves, int32 ``[M, 5]``: a few slots get other experts."""
    new_RS, moves = old_RS.copy(), []
    ranks, slots = old_RS.shape
    for _ in range(random.randint(0, 2 * ranks)):
        rank, slot = random.randrange(ranks), random.randrange(slots)
        old, new = int(new_RS[rank, slot]), random.randrange(experts)
        if (
            old_RS[rank, slot] != old
            or new in old_RS[rank]
            or new in new_RS[rank]
            or (new_RS == old).sum() < 2
        ):
            continue
        holders = np.argwhere(old_RS == new).tolist()
        source = holders[random.randrange(len(holders))]
        new_RS[rank, slot] = new
        moves.append((*source, rank, slot, new))
    return new_RS, np.array(moves, dtype=np.int32).reshape(-1, 5)
