"""Logs are lines that machines can read, or people, and less than the level asked for is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from eplb_service.telemetry.logs import configure_logs


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_without_a_terminal_each_event_is_a_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("auto", "info")
    structlog.get_logger().info("decision", deployment="decode", layers=3)
    event = json.loads(capsys.readouterr().err)
    assert (event["event"], event["deployment"], event["layers"], event["level"]) == (
        "decision",
        "decode",
        3,
        "info",
    )


def test_people_get_key_value_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("console", "info")
    structlog.get_logger().info("decision", deployment="decode")
    assert "deployment=decode" in capsys.readouterr().err


def test_the_level_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "warning")
    structlog.get_logger().info("decision")
    assert capsys.readouterr().err == ""
