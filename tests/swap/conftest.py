"""Fixtures for tests of the switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from worker_agent.swap.peers import Peers


@pytest.fixture(autouse=True)
def close_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the peers that a test has left open. Their threads would call ranks of later tests on reused ports."""
    opened: list[Peers] = []
    start = Peers.__init__

    def start_tracked(peers: Peers, *arguments: Any, **options: Any) -> None:
        start(peers, *arguments, **options)
        opened.append(peers)

    monkeypatch.setattr(Peers, "__init__", start_tracked)
    yield
    for peers in opened:
        peers.close()
