"""A live expert that is overwritten is reported on its rank and where a replica of it is, and is copied nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import replica_check


def _serve(agent: Any, layer: Any, over: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Call the agent as a host does, without the model's collectives, until something holds on this rank."""
    end = time.monotonic() + seconds
    while not over() and time.monotonic() < end:
        layer.load_counter += 1
        agent.step()
        time.sleep(0.002)
    return over()


def _damaged() -> dict[str, Any]:
    """One byte of an expert of rank 1 changes while it is served; a plan wants to copy it to another rank."""
    replica_check._REST_SECONDS = replica_check._REST_PER_SECOND = 0.0
    agent, (layer,), _ = live.start(1, vote_interval=1, vote_lag=1)
    replicas, rank = agent._switch._replicas, agent.identity.rank
    rounds = 2 * live.SLOTS
    reported = {"alike": _serve(agent, layer, lambda: replicas._turn > rounds) and agent._beat().error}
    here_RS = agent.installed.placement.phy2log_LRS[0]
    replicated = [expert for expert in here_RS[1] if expert in here_RS[0] or expert in here_RS[2]]
    slot = list(here_RS[1]).index(replicated[0])
    if rank == 1:
        layer.expert_weights()[0][slot].view(-1)[3] += 1.0
    holds = rank == 1 or replicated[0] in here_RS[rank]
    reported["damaged"] = (
        _serve(agent, layer, lambda: bool(agent._beat().error) or not holds) and agent._beat().error
    )
    reported["holds"] = holds
    reported["source"] = ""
    try:
        replicas.check_source(0, slot)
    except ValueError as error:
        reported["source"] = str(error)
    # A host that has changed weights says so by a drain: what they are then is right.
    replicas.forget()
    reported["forgotten"] = replicas.complaint
    reported["halted"] = agent.halted
    _serve(agent, layer, lambda: False, 0.5)
    agent._switch.drain("the host changes weights")
    turns = replicas._turn
    time.sleep(0.1)
    reported["reads while drained"] = (replicas.reading, replicas._turn - turns)
    agent.close()
    return reported


def test_an_expert_that_changes_while_it_is_served_is_reported_and_no_source() -> None:
    ranks = run_ranks(live.RANKS, _damaged)
    for rank, reported in enumerate(ranks):
        assert reported["alike"] == ""
        assert reported["halted"] is None
        assert reported["forgotten"] is None
        assert reported["reads while drained"] == (False, 0)
        if rank == 1:
            assert "of rank 1 has changed while it was served" in reported["damaged"]
            assert reported["source"] == reported["damaged"]
        elif reported["holds"]:
            assert "differs from its replica on rank" in reported["damaged"]
