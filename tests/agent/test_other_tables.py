"""All ranks stop if a device table differs from the installed layout, even if a later commit overwrites the table."""

from __future__ import annotations

import time

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import table_check
from worker_agent.swap.commit_register import FatalSwitchError

CHANGED_AT = 6


def _serve_a_corrupt_table(commits: bool) -> tuple[str, int]:
    """Corrupt a table on rank 1, optionally commit its layer, and return this rank's fatal error and epoch."""
    table_check._ROUND_BOUNDARIES = 1_000_000 if commits else 2
    agent, layers, _ = live.start(1, vote_interval=1, vote_lag=1)
    try:
        # The model runs no collectives here, so a rank that stops does not block its peers' calls.
        for step in range(4000):
            if step == CHANGED_AT and agent.identity.rank == 1:
                layers[0].log2phy.copy_(layers[0].log2phy.roll(1, dims=0))
            if step == CHANGED_AT and commits:
                live.offer(agent, {0: live.target()})
            layers[0].load_counter += 1
            agent.step()
            time.sleep(0.002)
    except FatalSwitchError as fatal:
        return str(fatal), agent.installed.epoch
    return "kept serving", agent.installed.epoch


def test_a_corrupt_table_stops_all_ranks() -> None:
    for reported, _ in run_ranks(live.RANKS, _serve_a_corrupt_table, False):
        assert reported.startswith("rank 1: layer 0: log2phy of expert")


def test_a_corrupt_table_stops_all_ranks_even_after_a_commit() -> None:
    for reported, epoch in run_ranks(live.RANKS, _serve_a_corrupt_table, True):
        assert reported.startswith("rank 1: layer 0: log2phy of expert")
        assert epoch == 1
