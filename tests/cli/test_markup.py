"""Every text that comes over the wire is shown as it is: no command takes it for markup."""

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


def made_hostile(message: Message) -> int:
    """Give every text of a message, and of all in it, the hostile one; returns how many there were."""
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
            count += sum(map(made_hostile, value if repeated else [value]))
    return count


def hostile() -> Any:
    look = messages(4, 3, problems=("a problem",))
    for part in (*look.known, look.whole, look.balance, look.history):
        assert made_hostile(part)
    return look


SHOWN: dict[str, Callable[[Any], Any]] = {
    "deployments": lambda look: operator_pb2.ListDeploymentsResponse(deployments=look.known),
    "status decode --explain": lambda look: look.whole,
    "history decode --plan 17": lambda look: look.history,
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_shows_hostile_text_as_it_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = SHOWN[command](hostile())
    monkeypatch.setattr(operator, "_ask", lambda service, name, request: answer)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert run(command.split()) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert HOSTILE in shown
    assert shown.count("[/nope]") == shown.count(HOSTILE)


@pytest.mark.parametrize("height", [None, 24])
def test_top_shows_hostile_text_as_it_is(height: int | None) -> None:
    look = hostile()
    shown = "\n".join(drawn(render(look.known, look.whole, look.balance, WIDTH, height), WIDTH))
    assert shown.count("[/nope]") == shown.count(HOSTILE) >= 4
