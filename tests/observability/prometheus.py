"""A real Prometheus with the rules of ``deploy/``, whose waits are shortened from minutes to seconds."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules.yml"
Alert: TypeAlias = tuple[str, str]
"""Name and deployment of an alert. The deployment is empty if the alert has none."""

RATE_SECONDS = 12
_SHORTER = (
    (r"\bfor: \w+", "for: 1s"),
    (r"\[(?:5|15|30)m\]", f"[{RATE_SECONDS}s]"),
    (r"\[6h\]", "[60s]"),
    (r"> 3600\b", "> 8"),
    (r"> (?:4096|256)\b", "> 64"),
)


def shortened(rules: str) -> str:
    """Return the rules with shorter waits. Raises ``AssertionError`` if one of the waits no longer exists."""
    for pattern, shorter in _SHORTER:
        rules, count = re.subn(pattern, shorter, rules)
        assert count, pattern
    return rules


class Prometheus:
    """Client of the HTTP API of a Prometheus server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[Any]:
        """Return the series of an instant query. Raises ``AssertionError`` with Prometheus' message if it fails."""
        try:
            data = self._ask(f"query?{urllib.parse.urlencode({'query': expression})}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return list(data["result"])

    def firing(self) -> set[Alert]:
        """Return the firing alerts."""
        alerts = self._ask("alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("deployment", ""))
            for alert in alerts
            if alert["state"] == "firing"
        }

    async def until(
        self, *, fire: Set[Alert] = frozenset(), end: Set[Alert] = frozenset(), seconds: float = 90
    ) -> None:
        """Wait until every alert in ``fire`` has fired and no alert in ``end`` is firing."""
        fired: set[Alert] = set()
        for _ in range(int(2 * seconds)):
            firing = await asyncio.to_thread(self.firing)
            fired |= firing
            if fire <= fired and not end & firing:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"never fired: {sorted(fire - fired)}; not ended: {sorted(end & firing)}")

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=20) as answer:
            return json.loads(answer.read())["data"]


@contextmanager
def prometheus(program: str, folder: Path, targets: list[str]) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ``targets`` every second."""
    (folder / "rules.yml").write_text(shortened(RULES.read_text()))
    scrape = {"job_name": "any-name", "static_configs": [{"targets": targets}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    log = (folder / "log").open("w")
    with (
        log,
        subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        ) as process,
    ):
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(20)
