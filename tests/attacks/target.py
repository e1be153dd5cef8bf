"""A real `eplb serve` process to attack, with access to its memory use and log, and honest ranks to connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc
from tests.control.fake_group import FakeGroup, FakeRank, first_placement, live_of, skewed_heat
from tests.control.server.grpc_calls import bearer
from tests.e2e.service import Service

LIVE = live_of(first_placement())
MESSAGE_BYTES = 4 << 20
STREAMS_PER_PEER = 64
CONNECTIONS = 256
HEAT_BYTES = 128 << 20
AGENT = "agent-token-of-decode"
OPERATOR = "operator-token-of-all"
READER = "reader-token-of-decode"
CREDENTIALS = f"""
- {{name: agents, role: agent, deployments: [decode], ranks: 0-3, token: {AGENT}}}
- {{name: on-call, role: operator, deployments: ['*'], token: {OPERATOR}}}
- {{name: dashboard, role: reader, deployments: [decode], token: {READER}}}
"""
FLAGS = {
    "--store": ":memory:",
    "--threads": 1,
    "--max-message-bytes": MESSAGE_BYTES,
    "--max-streams-per-peer": STREAMS_PER_PEER,
    "--max-streams": CONNECTIONS,
    "--max-heat-bytes": HEAT_BYTES,
}


_FORMINGS = itertools.count()


@dataclass(frozen=True)
class Target:
    """The service under attack and a channel to it."""

    service: Service
    channel: grpc.aio.Channel

    @property
    def health_address(self) -> str:
        """Address of the health-check port."""
        return self.service._flags[self.service._flags.index("--health") + 1]

    @property
    def stub(self) -> Any:
        """Stub for operator RPCs."""
        return operator_pb2_grpc.OperatorServiceStub(self.channel)

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes."""
        assert self.service._process is not None
        status = Path(f"/proc/{self.service._process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) * 1024

    @property
    def log_lines(self) -> int:
        """Number of lines that the service has logged."""
        return self.service.log.read_bytes().count(b"\n")

    def rank(self, number: int = 0, token: str = "") -> FakeRank:
        """Return a rank that has not sent anything on its stream yet."""
        return FakeRank(self.channel, number, bearer(token) if token else None)

    async def status_of_silent_stream(self, token: str = "") -> grpc.StatusCode:
        """Open a stream that sends nothing; return the status of its rejection.

        Tests must not read from such a stream, because a read would block forever.
        """
        code, _ = await self.rank(token=token).refusal()
        return code

    async def refusal(self, hello: Any, token: str = "", number: int = 0) -> grpc.StatusCode:
        """Send ``hello``; return the status of the rejection."""
        rank = self.rank(number, token)
        await rank.say(hello=hello)
        code, _ = await rank.refusal()
        return code

    @contextlib.asynccontextmanager
    async def honest(self, **changes: Any) -> AsyncIterator[FakeGroup]:
        """Run a group of honest ranks; on exit, check that its heat still arrives."""
        async with FakeGroup(self.service.address) as group:
            # Use a new group id, so that this group's step numbers do not continue earlier groups' numbers.
            await group.join(**{"group_id": f"honest-{next(_FORMINGS)}", **changes})
            yield group
            name = changes.get("deployment", "decode")
            before = (await self.status(name)).steps_received
            for _ in range(4):
                await group.send_heat(skewed_heat(8))
            for _ in range(1200):
                if (await self.status(name)).steps_received >= before + 16:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("heat from honest ranks no longer arrives")

    async def status(self, name: str = "decode", token: str = "") -> operator_pb2.DeploymentStatus:
        """Return the deployment's status as an operator sees it."""
        request = operator_pb2.GetStatusRequest(deployment=name)
        answer = await self.stub.GetStatus(request, metadata=bearer(token) if token else None, timeout=30)
        status: operator_pb2.DeploymentStatus = answer.status
        return status

    async def code_of(self, call: str, request: Any, metadata: Any = None) -> grpc.StatusCode:
        """Return the status code of an operator RPC."""
        try:
            await getattr(self.stub, call)(request, metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK
