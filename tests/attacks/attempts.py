"""What strangers try, each with what must come of it: refused, or bounded, and never at honest ranks' cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from eplb_service.wire.codec import pack
from eplb_service.wire.generated import agent_pb2, operator_pb2, tensor_pb2
from eplb_service.wire.parts import in_parts
from tests.attacks import target as to
from tests.attacks.target import LIVE, Target, bearer
from tests.control.fake_group import FakeGroup, FakeRank, heat_report, hello_of, refusal_of, skewed_heat

Code = grpc.StatusCode
PAUSE = operator_pb2.PauseRequest(deployment="decode")
LIST = operator_pb2.ListDeploymentsRequest()
MIB = 1 << 20


@dataclass(frozen=True)
class Attempt:
    """One thing to try; ``run`` fails where it does harm, and returns what came of it.

    ``locked``: against a service that asks for credentials.
    """

    name: str
    locked: bool
    run: Callable[[Target], Awaitable[str]]


ATTEMPTS: list[Attempt] = []


def attempt(name: str, locked: bool = False) -> Callable[[Any], Any]:
    """Lists what it decorates."""

    def listed(run: Callable[[Target], Awaitable[str]]) -> Callable[[Target], Awaitable[str]]:
        ATTEMPTS.append(Attempt(name, locked, run))
        return run

    return listed


def refused(
    name: str, expected: grpc.StatusCode, locked: bool, call: Callable[[Target], Awaitable[Any]]
) -> None:
    """List an attempt that must end with a status."""

    async def run(target: Target) -> str:
        code = await call(target)
        assert code is expected, f"{code}, not {expected}"
        return f"refused: {code.name}"

    ATTEMPTS.append(Attempt(name, locked, run))


def _spoilt_heat(first_step: int = 0, **changes: Any) -> agent_pb2.HeatReport:
    report = heat_report(LIVE, 0, 0, skewed_heat(8))
    report.first_step = first_step
    for field, value in changes.items():
        getattr(report, field).CopyFrom(value)
    return report


async def _says(target: Target, **message: Any) -> grpc.StatusCode:
    """What a whole group's rank 0 is refused with for a message."""
    async with FakeGroup(target.service.address) as group:
        await group.join()
        await group.ranks[0].say(**message)
        code, _ = await group.ranks[0].refusal()
        return code


_TOO_LARGE = agent_pb2.ConnectRequest(heartbeat=agent_pb2.Heartbeat(error="x" * (to.MESSAGE_BYTES + 1)))


async def _says_after_hello(target: Target, *requests: agent_pb2.ConnectRequest) -> grpc.StatusCode:
    """What a rank is refused with, while it is still speaking."""
    hello = agent_pb2.ConnectRequest(hello=_hello())
    code, _ = await refusal_of(target.service.address, hello, *requests)
    return code


def _hello(rank: int = 0, **changes: Any) -> agent_pb2.Hello:
    hello = hello_of(LIVE, 0, **changes)
    hello.rank = rank
    return hello


def _shaped(layers: int, experts: int, slots: int) -> agent_pb2.Hello:
    hello = _hello(deployment="fat", ep_size=1)
    hello.shape.layers, hello.shape.experts, hello.shape.slots = layers, experts, slots
    hello.placement.ClearField("layer_epochs")
    hello.placement.layer_epochs.extend([0] * layers)
    hello.placement.local_physical_to_logical.CopyFrom(
        pack(np.tile(np.arange(slots, dtype=np.int32), (layers, 1)))
    )
    hello.placement.log2phy.CopyFrom(pack(np.tile(np.arange(experts, dtype=np.int32), (layers, 1))))
    return hello


def _bomb() -> agent_pb2.Hello:
    hello = _hello()
    hello.placement.log2phy.CopyFrom(
        tensor_pb2.PackedArray(
            dtype=tensor_pb2.DATA_TYPE_INT32,
            shape=(3, 8),
            compression=tensor_pb2.COMPRESSION_ZLIB,
            data=zlib.compress(bytes(256 * MIB)),
        )
    )
    return hello


def _raw(target: Target, method: str, body: bytes, metadata: Any = None) -> Any:
    return target.channel.unary_unary(method)(body, metadata=metadata, timeout=60)


# Without credentials, or with another's

refused("read without a token", Code.UNAUTHENTICATED, True, lambda t: t.code_of("ListDeployments", LIST))
refused("pause without a token", Code.UNAUTHENTICATED, True, lambda t: t.code_of("Pause", PAUSE))
refused(
    "pause with a wrong token",
    Code.UNAUTHENTICATED,
    True,
    lambda t: t.code_of("Pause", PAUSE, bearer("x" * 21)),
)
refused(
    "the right token in another scheme",
    Code.UNAUTHENTICATED,
    True,
    lambda t: t.code_of("Pause", PAUSE, (("authorization", f"Basic {to.OPERATOR}"),)),
)
refused("a stream without a token", Code.UNAUTHENTICATED, True, lambda t: t.turned_away())
refused(
    "a reader pauses", Code.PERMISSION_DENIED, True, lambda t: t.code_of("Pause", PAUSE, bearer(to.READER))
)
refused(
    "an agent pauses", Code.PERMISSION_DENIED, True, lambda t: t.code_of("Pause", PAUSE, bearer(to.AGENT))
)
refused("an operator poses as a rank", Code.PERMISSION_DENIED, True, lambda t: t.turned_away(to.OPERATOR))
refused(
    "an agent of another deployment",
    Code.PERMISSION_DENIED,
    True,
    lambda t: t.refusal(_hello(deployment="prefill"), to.AGENT),
)
refused(
    "an agent of another rank",
    Code.PERMISSION_DENIED,
    True,
    lambda t: t.refusal(_hello(rank=5, ep_size=8), to.AGENT),
)
refused(
    "a reader looks at another deployment",
    Code.PERMISSION_DENIED,
    True,
    lambda t: t.code_of("GetStatus", operator_pb2.GetStatusRequest(deployment="prefill"), bearer(to.READER)),
)


@attempt("120 MB of bodies without a token, 30 at once", locked=True)
async def _bodies(target: Target) -> str:
    return await _flood(target, "/eplb.v1.OperatorService/Pause", 96 * MIB)


@attempt("120 MB of bodies to the health check, 30 at once", locked=True)
async def _health_bodies(target: Target) -> str:
    return await _flood(
        target, f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check", 256 * MIB
    )


async def _flood(target: Target, method: str, most: int) -> str:
    before = target.resident_bytes
    calls = [_raw(target, method, bytes(to.MESSAGE_BYTES - 100)) for _ in range(30)]
    await asyncio.gather(*(asyncio.wait_for(call, 60) for call in calls), return_exceptions=True)
    grown = target.resident_bytes - before
    assert grown < most, f"{grown >> 20} MiB more"
    return f"bounded: {max(0, grown) >> 20} MiB more"


@attempt("a megabyte of metadata", locked=True)
async def _metadata(target: Target) -> str:
    many = tuple((f"key-{number}", "x" * 1000) for number in range(1000))
    code = await target.code_of("ListDeployments", LIST, many)
    assert code is not Code.OK
    assert await target.code_of("ListDeployments", LIST, bearer(to.READER)) is Code.OK
    return f"refused: {code.name}"


# Bytes and connections


@attempt("noise on 64 connections")
async def _noise(target: Target) -> str:
    host, _, port = target.service.address.rpartition(":")
    rng = np.random.default_rng(0)
    async with target.honest():
        for _ in range(64):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(rng.bytes(4096))
    return "refused: connections end"


@attempt(f"{2 * to.CONNECTIONS} connections that say nothing")
async def _mute(target: Target) -> str:
    host, _, port = target.service.address.rpartition(":")
    before, links = target.resident_bytes, []
    async with target.honest():
        for _ in range(2 * to.CONNECTIONS):
            with contextlib.suppress(OSError):
                links.append(socket.create_connection((host, int(port)), timeout=5))
        await asyncio.sleep(0.5)
        grown = target.resident_bytes - before
        for link in links:
            link.close()
    assert grown < 64 * MIB
    return f"bounded: {max(0, grown) >> 20} MiB more"


refused(
    "a message past the limit",
    Code.RESOURCE_EXHAUSTED,
    False,
    lambda t: _says_after_hello(t, _TOO_LARGE),
)
refused(
    "a request in parts past the limit",
    Code.RESOURCE_EXHAUSTED,
    False,
    lambda t: _says_after_hello(t, *in_parts(_TOO_LARGE)),
)
refused(
    "a request in parts that promises an exabyte",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: _says_after_hello(
        t, agent_pb2.ConnectRequest(part=agent_pb2.Part(data=b"x", bytes_left=1 << 60))
    ),
)


@attempt("60 requests in parts that are broken off one part before their end")
async def _broken_off(target: Target) -> str:
    *parts, _ = in_parts(agent_pb2.ConnectRequest(hello=_hello(node="x" * (to.MESSAGE_BYTES - 4096))))
    before = target.resident_bytes
    async with target.honest():
        tried = [target.rank() for _ in range(60)]
        writing = [asyncio.ensure_future(_write_all(rank, parts)) for rank in tried]
        await asyncio.wait(writing, timeout=3)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        grown = target.resident_bytes - before
        for rank in tried:
            rank.call.cancel()
    # Of one host eight at most are read at a time; what is on its way to the others is a window each.
    assert grown < 128 * MIB, f"{grown >> 20} MiB more"
    return f"bounded: {max(0, grown) >> 20} MiB more"


async def _write_all(rank: FakeRank, parts: list[agent_pb2.ConnectRequest]) -> None:
    for part in parts:
        await rank.call.write(part)


@attempt("30 Hellos of the largest size at once, three times")
async def _fat_hellos(target: Target) -> str:
    hello = _hello(node="x" * (to.MESSAGE_BYTES - 4096))
    grown, before = [], target.resident_bytes
    for _ in range(3):
        codes = await asyncio.gather(*(target.refusal(hello) for _ in range(30)))
        assert set(codes) <= {Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED}
        grown.append(target.resident_bytes - before)
    # What the allocator keeps of the first is used again by the others.
    assert grown[0] < 128 * MIB, grown
    assert grown[2] - grown[0] < 64 * MIB, grown
    return f"bounded: {', '.join(str(max(0, more) >> 20) for more in grown)} MiB more after each of three"


@attempt("a host with more streams than it may have")
async def _streams(target: Target) -> str:
    # Each on a connection of its own: one connection's streams are bounded before that.
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target.service.address, options=options) for _ in range(100)]
    ranks = [FakeRank(channel, 0) for channel in channels]
    done, open_still = await asyncio.wait(
        [asyncio.ensure_future(rank.call.code()) for rank in ranks], timeout=5
    )
    codes = [task.result() for task in done]
    for task in open_still:
        task.cancel()
    for channel in channels:
        await channel.close()
    assert len(codes) >= 100 - to.STREAMS_PER_PEER
    assert set(codes) == {Code.RESOURCE_EXHAUSTED}
    return f"bounded: {len(codes)} of 100 refused"


@attempt("500 refused Hellos and what they leave in the log")
async def _log_flood(target: Target) -> str:
    before = target.log_lines
    for _ in range(10):
        await asyncio.gather(*(target.refusal(_hello(group_id="")) for _ in range(50)))
    lines = target.log_lines - before
    assert lines < 450
    return f"bounded: {lines} lines"


@attempt("30 watchers of one host")
async def _watchers(target: Target) -> str:
    async with target.honest():
        request = operator_pb2.WatchHeatRequest(deployment="decode")
        calls = [target.stub.WatchHeat(request) for _ in range(30)]
        first = await asyncio.gather(
            *(asyncio.wait_for(call.read(), 20) for call in calls), return_exceptions=True
        )
        let_in = sum(isinstance(message, operator_pb2.WatchHeatResponse) for message in first)
        for call in calls:
            call.cancel()
    assert let_in <= 8
    return f"bounded: {let_in} let in"


# Deployments and seats

refused("an array that inflates to 256 MB", Code.INVALID_ARGUMENT, False, lambda t: t.refusal(_bomb()))
refused(
    "a shape past all bounds",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: t.refusal(_hello(ep_size=4_000_000_000)),
)
refused(
    "a deployment that costs more memory than there is",
    Code.RESOURCE_EXHAUSTED,
    False,
    lambda t: t.refusal(_shaped(512, 512, 512)),
)


@attempt("names of nothing push out a paused deployment")
async def _push_out(target: Target) -> str:
    async with target.honest(deployment="kept"):
        await target.stub.Pause(operator_pb2.PauseRequest(deployment="kept"))
    for number in range(3 * to.DEPLOYMENTS):
        rank = target.rank()
        await rank.say(hello=_hello(deployment=f"junk-{number}"))
        with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):
            await rank.hear()
        rank.call.cancel()
    status = await target.status("kept")
    assert status.paused
    assert status.steps_received
    return "refused: it is kept, and paused"


refused("a rank past its group", Code.INVALID_ARGUMENT, False, lambda t: t.refusal(_hello(rank=9)))


@attempt("a rank of another group size")
async def _other_size(target: Target) -> str:
    async with target.honest():
        code = await target.refusal(_hello(rank=7, ep_size=8))
        assert code is Code.FAILED_PRECONDITION
    return f"refused: {code.name}"


@attempt("a seat held by another forming")
async def _seat(target: Target) -> str:
    async with target.honest(group_id="robbed") as group:
        group.ranks[1].call.cancel()
        await asyncio.sleep(0.2)
        code = await target.refusal(hello_of(LIVE, 1, group_id="stolen"), number=1)
        assert code is Code.FAILED_PRECONDITION
        group.ranks[1] = FakeRank(group.channel, 1)
        await group.ranks[1].greet(hello_of(LIVE, 1, group_id="robbed"))
    return f"refused: {code.name}"


# Values

refused(
    "heat at step 2^62",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: _says(t, heat_report=_spoilt_heat((1 << 62) - 100)),
)
refused(
    "counts below zero",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: _says(t, heat_report=_spoilt_heat(slot_counts=pack(np.full((8, 3, 3), -1, np.int32)))),
)
refused(
    "counts whose sum overflows",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: _says(t, heat_report=_spoilt_heat(slot_counts=pack(np.full((8, 3, 3), 2**31 - 1, np.int32)))),
)
refused("a node name with ESC", Code.INVALID_ARGUMENT, False, lambda t: t.refusal(_hello(node="\x1b[2J")))
refused(
    "a deployment name that is a path",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: t.refusal(_hello(deployment="../x")),
)
refused(
    "a question about a name of a megabyte",
    Code.RESOURCE_EXHAUSTED,
    False,
    lambda t: t.code_of("GetStatus", operator_pb2.GetStatusRequest(deployment="x" * MIB)),
)
refused(
    "a question about a name of 100 kB",
    Code.INVALID_ARGUMENT,
    False,
    lambda t: t.code_of("GetStatus", operator_pb2.GetStatusRequest(deployment="x" * 100_000)),
)


@attempt("heat at a step that nobody is at, six times")
async def _far(target: Target) -> str:
    async with target.honest() as group:
        for number in range(6):
            report = _spoilt_heat((1 << 47) + 4096 * number)
            await group.ranks[0].say(heat_report=report)
    assert await target.code_of("ListDeployments", LIST) is Code.OK
    return "bounded: honest heat goes on"


@attempt("an error with ESC in a heartbeat")
async def _escape(target: Target) -> str:
    async with FakeGroup(target.service.address) as group:
        await group.join()
        await group.ranks[0].say(
            heartbeat=agent_pb2.Heartbeat(epoch=LIVE.epoch, digest=LIVE.digest, error="\x1b]0;owned\x07")
        )
        for _ in range(100):
            if problems := (await target.status()).problems:
                break
            await asyncio.sleep(0.05)
        assert problems
        assert all(problem.isprintable() for problem in problems)
    return "bounded: shown without it"
