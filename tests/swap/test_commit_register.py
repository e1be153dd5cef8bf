"""Whoever writes first decides, all others obey, and a rank that cannot ask must not go on."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from worker_agent.swap.commit_register import CommitRegister, FatalSwitchError


def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=2), wait_for_workers=False)


def test_the_first_to_write_decides_for_all() -> None:
    store = _store()
    one, other = (CommitRegister(store, timedelta(seconds=5)) for _ in range(2))
    assert one.may_commit(7, heard=True)
    assert other.may_commit(7, heard=False)
    assert not other.may_commit(8, heard=False)
    assert not one.may_commit(8, heard=True)


def test_a_rank_that_cannot_ask_must_not_serve_on() -> None:
    class Gone:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset")

    with pytest.raises(FatalSwitchError, match="vote 3 may have committed a layer"):
        CommitRegister(Gone(), timedelta(seconds=5)).may_commit(3, heard=False)  # type: ignore[arg-type]
