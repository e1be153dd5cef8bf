"""An HTTP client for the pages and metrics of a service under test."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from eplb_service.control.server.service import RunningService


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def document(self) -> Any:
        return json.loads(self.body)


def _get(address: str, path: str, method: str, headers: dict[str, str], context: Any) -> Answer:
    host, _, port = address.rpartition(":")
    if context is None:
        connection: Any = http.client.HTTPConnection(host, int(port), timeout=20)
    else:
        connection = http.client.HTTPSConnection("localhost", int(port), timeout=20, context=context)
    try:
        connection.request(method, path, headers=headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


async def get(
    address: str, path: str, *, token: str = "", method: str = "GET", context: Any = None, **headers: str
) -> Answer:
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return await asyncio.to_thread(_get, address, path, method, headers, context)


Samples = dict[tuple[str, tuple[str, ...]], float]


async def scrape(service: RunningService) -> Samples:
    text = (await get(service.metrics_address, "/metrics")).body.decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
