"""The service is killed while the model serves: no step stops, no output changes, balancing goes on after a restart."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.agent import live
from tests.e2e.service import Service
from tests.ranks import run_ranks
from worker_agent.agent import Agent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RANKS = 3
STEP_SECONDS = 0.004


def _serve(address: str, stop_file: str) -> dict[str, Any]:
    """Serve until the file appears; what is hot changes every two seconds. Ranks agree on the end by a collective."""
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    layers, still = (live.layers_of(2, live.linear_RS(RANKS)) for _ in range(2))
    agent = Agent.start(layers, group, live.settings(service=address))
    generator = np.random.default_rng(rank)
    worst, longest, began = 0.0, 0.0, time.monotonic()
    going = torch.ones(1)
    while going.item():
        hot = int((time.monotonic() - began) / 2) % live.EXPERTS
        other_T = generator.integers(1, live.EXPERTS, size=12)
        ids_TK = torch.from_numpy(np.stack([np.full(12, hot), (hot + other_T) % live.EXPERTS], axis=1))
        hidden_TH = torch.from_numpy(generator.standard_normal((12, live.HIDDEN), dtype=np.float32))
        weights_TK = torch.full((12, live.TOP_K), 0.5)
        for one, twin in zip(layers, still, strict=True):
            difference = one(hidden_TH, ids_TK, weights_TK) - twin(hidden_TH, ids_TK, weights_TK)
            worst = max(worst, float(difference.abs().max()))
        before = time.monotonic()
        agent.step()
        longest = max(longest, time.monotonic() - before)
        time.sleep(STEP_SECONDS)
        going.fill_(0.0 if Path(stop_file).exists() else 1.0)
        dist.all_reduce(going, op=dist.ReduceOp.MIN, group=group)
    agent.close()
    return {
        "worst": worst,
        "longest_step": longest,
        "epoch": agent.installed.epoch,
        "digest": agent.installed.digest,
        "halted": agent.halted,
    }


@pytest.mark.slow
def test_ranks_serve_on_and_converge_when_the_service_is_killed_and_restarted(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    flags = ("--window-steps", "64", "--decision-interval", "32", "--report-steps", "8")
    store = ("--store", str(tmp_path / "state.sqlite3"))
    facts: list[dict[str, Any]] = []
    with Service(tmp_path, *flags, *store) as service:
        ranks = threading.Thread(
            target=lambda: facts.extend(
                run_ranks(RANKS, _serve, service.address, str(stop_file), deadline=500)
            )
        )
        ranks.start()
        try:
            first = service.wait_until(lambda status: status.status.epoch >= 2)
            service.kill()
            time.sleep(1.0)
            service.start()
            back = service.wait_until(lambda status: status.status.agents_connected == RANKS)
            assert back.status.epoch >= first.status.epoch
            later = service.wait_until(lambda status: status.status.epoch > back.status.epoch)
            assert list(later.status.problems) == []
        finally:
            stop_file.touch()
            ranks.join()
    assert len(facts) == RANKS
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [fact["halted"] for fact in facts] == [None] * RANKS
    assert len({fact["digest"] for fact in facts}) == 1
    assert facts[0]["epoch"] >= 3
    # No step waited for the service: a busy machine may hold one up, but by far not to the shortest deadline.
    assert max(fact["longest_step"] for fact in facts) < 20.0
