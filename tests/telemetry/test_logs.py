"""Log lines for machines or people, filtered by level, with a bounded rate for lines that unauthenticated clients can
cause.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest
import structlog

from eplb_service.telemetry.logs import BoundedLog, bounding_library_logs, configure_logs


@pytest.fixture(autouse=True)
def reset_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_without_a_terminal_each_event_at_the_configured_level_is_a_json_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("warning")
    structlog.get_logger().info("decision")
    structlog.get_logger().warning("decision", deployment="decode", layers=3)
    event = json.loads(capsys.readouterr().err)
    assert event.pop("timestamp")
    assert event == {"event": "decision", "deployment": "decode", "layers": 3, "level": "warning"}


@pytest.mark.parametrize("output", ["terminal", "file"])
def test_a_terminal_gets_key_value_pairs_and_tracebacks_omit_local_variables(
    output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: output == "terminal")
    configure_logs()
    local_value = "heat" + " of a window"
    try:
        raise RuntimeError(len(local_value))
    except RuntimeError:
        structlog.get_logger().exception("decision_failed", deployment="decode")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(capsys.readouterr()))
    assert ("deployment=decode" in text) is (output == "terminal")
    assert "Traceback (most recent call last)" in text
    assert "RuntimeError: 16" in text
    assert local_value not in text


async def test_errors_from_abandoned_tasks_and_libraries_are_logged_at_a_bounded_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs()
    dropped_lines: list[int] = []

    async def fail() -> None:
        raise RuntimeError("abandoned")

    with bounding_library_logs(BoundedLog(lambda: dropped_lines.append(1), clock=lambda: 0.0)):
        for _ in range(200):
            asyncio.ensure_future(fail())  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(0.01)
        gc.collect()
        for _ in range(200):
            logging.getLogger("grpc").warning("a peer has %s", "misbehaved")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 256
    # Threads of other tests may log warnings too.
    assert len(dropped_lines) >= 144
    assert {line["event"] for line in lines} == {"task_failed", "library_warning"}
    assert "RuntimeError: abandoned" in lines[0]["exception"]
    assert lines[-1]["message"] == "a peer has misbehaved"
    assert not [
        handler for handler in logging.getLogger().handlers if "eplb_service" in type(handler).__module__
    ]
