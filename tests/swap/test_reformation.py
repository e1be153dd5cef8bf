"""Ranks that have lost the votes agree on the number of their attempt: the highest that any of them is at."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker_agent.swap import reformation as module
from worker_agent.swap.reformation import Reformation, Standing


def test_a_rank_that_is_behind_takes_the_number_of_the_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BACKOFF_SECONDS", 0.0)
    store: dict[str, str] = {}
    ahead = {1: b"+5", 2: b"+9"}

    def ask(ranks: list[int], _question: bytes, _seconds: float) -> dict[int, bytes]:
        # Once this rank has said that it is at the ninth attempt, the other comes to it too.
        mine = store["attempt/0"]
        return {rank: b"+9" if mine == "9" else ahead[rank] for rank in ranks}

    named: list[str] = []

    def refuse(name: str) -> None:
        named.append(name)
        raise OSError("no links in this test")

    group = SimpleNamespace(
        rank=0,
        peers=SimpleNamespace(others={1: None, 2: None}, ask=ask),
        store=SimpleNamespace(set=store.__setitem__),
        process_group=refuse,
    )
    tried = Reformation(cast(Any, group), Standing(0, 0, 0, 0), attempts=0, fruitless=0, now=lambda: 0)
    end = time.monotonic() + 60
    while not named and time.monotonic() < end:
        time.sleep(0.005)
    tried.close()
    assert named[0] == "vote/9"
