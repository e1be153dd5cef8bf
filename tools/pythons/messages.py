"""Encode and decode every message with the installed packages. ``tests/wire`` must be on the import path."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.wire.messages import KINDS, Kind, equal

EXAMPLES = 10


def check(kind: Kind) -> None:
    """Encode and decode examples of one message, and compare the results with the originals."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(kind.values)
    def survives_round_trip(value: Any) -> None:
        sent = kind.encode(value).SerializeToString()
        received = kind.decode(kind.message.FromString(sent))
        if not equal(received, value):
            raise SystemExit(f"{kind.message.DESCRIPTOR.name}: sent {value}, received {received}")

    survives_round_trip()


if __name__ == "__main__":
    for kind in KINDS.values():
        check(kind)
    print(f"{len(KINDS)} messages")
