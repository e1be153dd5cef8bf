"""Tests of text received from the service: every command prints it literally and never parses it as markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from eplb_core.wire.generated import operator_pb2
from eplb_service.cli import operator
from eplb_service.cli.main import run
from eplb_service.cli.top import render
from tests.cli.arguments import drawn
from tests.control.server.pictured import messages

HOSTILE = "[red]x[/red][/nope][link=http://h]y"
WIDTH = 4000


def poison(message: Message) -> int:
    """Replace every string in a message and its nested messages with ``HOSTILE``; return the number of strings."""
    count = 0
    for field, value in message.ListFields():
        repeated = hasattr(value, "append") or (
            hasattr(value, "MergeFrom") and not isinstance(value, Message)
        )
        if field.type == field.TYPE_STRING:
            count += 1
            if repeated:
                value[:] = [HOSTILE] * len(value)
            else:
                setattr(message, field.name, HOSTILE)
        elif field.type == field.TYPE_MESSAGE:
            count += sum(map(poison, value if repeated else [value]))
    return count


def hostile() -> Any:
    look = messages(4, 3, problems=("a problem",))
    for message in (*look.known, look.whole, look.balance, look.history):
        assert poison(message)
    return look


RESPONSES: dict[str, Callable[[Any], Any]] = {
    "deployments": lambda look: operator_pb2.ListDeploymentsResponse(deployments=look.known),
    "status decode --explain": lambda look: look.whole,
    "history decode --plan 17": lambda look: look.history,
}


@pytest.mark.parametrize("command", RESPONSES)
def test_a_command_prints_hostile_text_literally(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = RESPONSES[command](hostile())
    monkeypatch.setattr(operator, "_ask", lambda service, name, request: answer)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run(command.split()) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert HOSTILE in shown
    assert shown.count("[/nope]") == shown.count(HOSTILE)


@pytest.mark.parametrize("height", [None, 24])
def test_top_prints_hostile_text_literally(height: int | None) -> None:
    look = hostile()
    shown = "\n".join(drawn(render(look.known, look.whole, look.balance, WIDTH, height), WIDTH))
    assert shown.count("[/nope]") == shown.count(HOSTILE) >= 4
