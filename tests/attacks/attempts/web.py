"""Cross-site or malformed HTTP requests to the status page and its JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.attacks import target as to
from tests.attacks.attempts.registry import attempt
from tests.attacks.target import Target
from tests.control.server.http_client import get

LIST = "/api/v1/deployments"


def _answered(
    name: str, proves: str, status: int, path: str, *, locked: bool = False, **request: Any
) -> None:
    @attempt(name, proves, locked=locked)
    async def run(target: Target) -> str:
        answer = await get(target.service.metrics_address, path, **request)
        assert answer.status == status, answer.status
        return f"rejected: {status}"


SECRET = "only readers see figures"
READS = "the page is read-only"
FILES = "only the page's own files are served"
_answered("the page's figures without a token", SECRET, 401, LIST, locked=True)
_answered("the page's figures with a wrong token", SECRET, 401, LIST, locked=True, token="x" * 21)
_answered("the page's figures with an agent's token", SECRET, 403, LIST, locked=True, token=to.AGENT)
_answered(
    "another deployment's figures with a reader's token",
    SECRET,
    403,
    f"{LIST}/prefill/history",
    locked=True,
    token=to.READER,
)
_answered("the page's figures under a foreign host name", SECRET, 403, LIST, Host="rebound.example")
_answered("a command over HTTP", READS, 405, LIST, method="POST")
_answered("a file outside the page", FILES, 404, "/../http_server.py")
_answered("a percent-encoded path outside the page", FILES, 404, "/%2e%2e/http_server.py")
_answered("a deployment name with a zero byte", "names are validated", 400, f"{LIST}/%00")


@attempt("an HTTP header of 1 MiB", "request headers are bounded")
async def _endless(target: Target) -> str:
    host, _, port = target.service.metrics_address.rpartition(":")
    before = target.resident_bytes
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (1 << 20))
    answer = await asyncio.wait_for(reader.read(64), 20)
    assert answer == b"" or answer.split()[1] == b"400", answer
    writer.close()
    grown = target.resident_bytes - before
    assert grown < 16 << 20
    return f"rejected: memory grew by {max(0, grown) >> 20} MiB"
