"""Every message of the wire: how good ones are drawn, encoded and decoded, and values that each field must refuse."""

from __future__ import annotations

from google.protobuf.message import Message

from tests.wire.messages import agent, history, operator
from tests.wire.messages.kind import ACCEPTED, Kind

__all__ = ["ACCEPTED", "BY_NAME", "KINDS"]

KINDS: dict[str, Kind] = {**agent.KINDS, **operator.KINDS, **history.KINDS}
BY_NAME: dict[str, type[Message]] = {**agent.BY_NAME, **operator.BY_NAME, **history.BY_NAME}
