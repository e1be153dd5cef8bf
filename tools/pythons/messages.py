"""Encode and decode every message with the installed packages; the path has a folder that holds ``tests/wire``."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.wire.messages import KINDS, Kind, equal

EXAMPLES = 10


def check(kind: Kind) -> None:
    """Send examples of one message and compare what comes back."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(kind.values)
    def comes_back(value: Any) -> None:
        sent = kind.encode(value).SerializeToString()
        received = kind.decode(kind.message.FromString(sent))
        if not equal(received, value):
            raise SystemExit(f"{kind.message.DESCRIPTOR.name}: sent {value}, received {received}")

    comes_back()


if __name__ == "__main__":
    for one in KINDS.values():
        check(one)
    print(f"{len(KINDS)} messages")
