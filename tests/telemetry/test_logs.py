"""Logs are lines that machines can read, or people, and less than the level asked for is left out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
import structlog

from eplb_service.telemetry.logs import configure_logs


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_without_a_terminal_each_event_is_a_json_object_of_the_level_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("warning")
    structlog.get_logger().info("decision")
    structlog.get_logger().warning("decision", deployment="decode", layers=3)
    event = json.loads(capsys.readouterr().err)
    assert event.pop("timestamp")
    assert event == {"event": "decision", "deployment": "decode", "layers": 3, "level": "warning"}


@pytest.mark.parametrize("where", ["terminal", "file"])
def test_a_terminal_gets_key_value_pairs_and_tracebacks_leave_out_local_variables(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: where == "terminal")
    configure_logs()
    counted = "heat" + " of a window"
    try:
        raise RuntimeError(len(counted))
    except RuntimeError:
        structlog.get_logger().exception("decision_failed", deployment="decode")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "".join(capsys.readouterr()))
    assert ("deployment=decode" in shown) is (where == "terminal")
    assert "Traceback (most recent call last)" in shown
    assert "RuntimeError: 16" in shown
    assert counted not in shown
