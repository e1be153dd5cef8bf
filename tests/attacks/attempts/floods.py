"""Floods of bytes, connections, streams and requests that exceed the service's limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

import grpc
import numpy as np

from eplb_core.wire.codec import in_parts
from eplb_core.wire.generated import agent_pb2, operator_pb2
from tests.attacks import target as to
from tests.attacks.attempts.registry import attempt, register_rejections
from tests.attacks.attempts.requests import MIB, TOO_LARGE, Code, hello_with, status_after_hello
from tests.attacks.target import Target
from tests.control.fake_group import FakeRank
from tests.control.server.silent_callers import CHECK, WATCH


@attempt("noise on 64 connections", "clients that do not speak HTTP/2 do not disturb other clients")
async def _noise(target: Target) -> str:
    host, _, port = target.service.address.rpartition(":")
    rng = np.random.default_rng(0)
    async with target.honest():
        for _ in range(64):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as link:
                link.sendall(rng.bytes(4096))
    return "rejected: the connections are closed"


@attempt(f"{2 * to.CONNECTIONS} silent connections", "memory is bounded for any input")
async def _mute(target: Target) -> str:
    host, _, port = target.service.address.rpartition(":")
    before = target.resident_bytes
    links = []
    async with target.honest():
        for _ in range(2 * to.CONNECTIONS):
            with contextlib.suppress(OSError):
                links.append(socket.create_connection((host, int(port)), timeout=5))
        await asyncio.sleep(0.5)
        grown = target.resident_bytes - before
        for link in links:
            link.close()
    assert grown < 64 * MIB
    return f"bounded: memory grew by {max(0, grown) >> 20} MiB"


register_rejections(
    Code.RESOURCE_EXHAUSTED,
    "memory is bounded for any input",
    {
        "a message above the size limit": lambda t: status_after_hello(t, TOO_LARGE),
        "a request in parts above the size limit": lambda t: status_after_hello(t, *in_parts(TOO_LARGE)),
        "a status request for a name of 1 MiB": lambda t: t.code_of(
            "GetStatus", operator_pb2.GetStatusRequest(deployment="x" * MIB)
        ),
    },
)
register_rejections(
    Code.INVALID_ARGUMENT,
    "memory is bounded for any input",
    {
        "a request in parts that announces an exabyte": lambda t: status_after_hello(
            t, agent_pb2.ConnectRequest(part=agent_pb2.Part(data=b"x", bytes_left=1 << 60))
        )
    },
)


@attempt(
    "60 requests in parts that stop before their last part",
    "memory is bounded for any input",
)
async def _broken_off(target: Target) -> str:
    *parts, _ = in_parts(agent_pb2.ConnectRequest(hello=hello_with(node="x" * (to.MESSAGE_BYTES - 4096))))
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
    # The service reads at most eight streams per host at a time. Every other stream has at most one flow-control window
    # in transit.
    assert grown < 128 * MIB, f"memory grew by {grown >> 20} MiB; expected less than 128 MiB"
    return f"bounded: memory grew by {max(0, grown) >> 20} MiB"


async def _write_all(rank: FakeRank, parts: list[agent_pb2.ConnectRequest]) -> None:
    for part in parts:
        await rank.call.write(part)


@attempt("30 concurrent Hellos of maximum size, three times", "memory is bounded for any input")
async def _fat_hellos(target: Target) -> str:
    hello = hello_with(node="x" * (to.MESSAGE_BYTES - 4096))
    grown = []
    before = target.resident_bytes
    for _ in range(3):
        codes = await asyncio.gather(*(target.refusal(hello) for _ in range(30)))
        assert set(codes) <= {Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED}
        grown.append(target.resident_bytes - before)
    # The allocator keeps the memory of the first round, and the other rounds reuse it.
    assert grown[0] < 128 * MIB, grown
    assert grown[2] - grown[0] < 64 * MIB, grown
    mebibytes = ", ".join(str(max(0, growth) >> 20) for growth in grown)
    return f"bounded: memory had grown by {mebibytes} MiB after the rounds"


@attempt("500 rejected Hellos", "log lines do not fill the disk")
async def _log_flood(target: Target) -> str:
    before = target.log_lines
    for _ in range(10):
        await asyncio.gather(*(target.refusal(hello_with(group_id="")) for _ in range(50)))
    lines = target.log_lines - before
    assert lines < 450
    return f"bounded: {lines} log lines"


CANCELLED = {
    "health checks": (CHECK, lambda target: target.service.address),
    "health watches": (WATCH, lambda target: target.service.address),
    "health checks on the health port": (CHECK, lambda target: target.health_address),
    "agent streams": ("/eplb.v1.AgentService/Connect", lambda target: target.service.address),
    "operator requests": (
        "/eplb.v1.OperatorService/ListDeployments",
        lambda target: target.service.address,
    ),
}


def _cancelled(name: str, method: str, address: Callable[[Target], str]) -> None:
    @attempt(f"600 {name}, cancelled immediately", "log lines do not fill the disk", locked=True)
    async def run(target: Target) -> str:
        async with grpc.aio.insecure_channel(address(target)) as channel:
            return await _few_lines_after(target, lambda: _cancel(channel.stream_stream(method), 600))


async def _cancel(method: grpc.aio.StreamStreamMultiCallable, count: int) -> None:
    calls = []
    for number in range(count):
        calls.append(method())
        if number % 50 == 49:
            await asyncio.sleep(0.02)
    for call in calls:
        call.cancel()


for name, (method, address) in CANCELLED.items():
    _cancelled(name, method, address)


@attempt("300 HTTP connections, reset immediately", "log lines do not fill the disk")
async def _reset(target: Target) -> str:
    host, _, port = target.service.metrics_address.rpartition(":")
    requests = (b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /api/v1/service HTTP/1.1\r\n\r\n", b"\x16\x03\x01")

    async def reset() -> None:
        for number in range(300):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link.sendall(requests[number % len(requests)])
            if number % 20 == 19:
                await asyncio.sleep(0.02)

    return await _few_lines_after(target, reset)


async def _few_lines_after(target: Target, flood: Callable[[], Awaitable[None]]) -> str:
    """Run a flood and return the new log lines.

    The log may grow by the rate limit's burst plus ten lines per second, and must not contain a traceback.
    """
    before = target.service.log.stat().st_size
    await flood()
    await asyncio.sleep(1)
    with target.service.log.open("rb") as log:
        log.seek(before)
        added = log.read()
    lines = added.count(b"\n")
    assert b"Traceback" not in added
    assert lines < 350
    return f"bounded: {lines} log lines"
