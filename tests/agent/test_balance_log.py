"""Only rank 0 logs the balance, at regular intervals, in the engine's log."""

from __future__ import annotations

import logging.handlers

import torch.distributed as dist

from eplb_core.wire.agent import Balance
from tests.agent import live
from tests.agent.live import RANKS
from tests.ranks import run_ranks
from worker_agent.swap.group import RendezvousError


def _lines() -> logging.handlers.BufferingHandler:
    handler = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger("eplb.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


def _logged_balances() -> list[str]:
    lines = _lines()
    agent, layers, still = live.start(1, log_interval_steps=8)
    live.drive(agent, layers, still, 10)
    # Close the stream, because its thread would reset the balance after the next failed connection.
    agent._stream.close(60)
    agent._stream.balance = Balance(1.2345, 32)
    live.drive(agent, layers, still, 10, live.offering(agent, {0: {0: live.target()}}), epoch=1)
    agent.close()
    return [line.getMessage() for line in lines.buffer if ": PAR " in line.getMessage()]


def test_rank_0_logs_the_balance_at_each_interval() -> None:
    first, *others = run_ranks(RANKS, _logged_balances)
    assert others == [[], []]
    assert first[:2] == [
        "rank 0: step 8: PAR unknown, because the service has not sent it",
        f"rank 0: step 16: PAR 1.234 over the last 32 steps, {first[1].split()[-5]} layers switched so far",
    ]


def _warnings(nodes: int) -> list[str]:
    lines = _lines()
    try:
        agent, _, _ = live.start(1, node=f"node-{dist.get_rank() % nodes}", data_host="localhost")
        agent.close()
    except RendezvousError as error:
        assert "loopback" in str(error)  # noqa: PT017
    return [line.getMessage() for line in lines.buffer if "EPLB_AGENT_DATA_HOST" in line.getMessage()]


def test_a_host_name_without_a_domain_causes_a_warning_if_there_are_several_nodes() -> None:
    assert run_ranks(2, _warnings, 1) == [[], []]
    for rank, warnings in enumerate(run_ranks(2, _warnings, 2)):
        (warning,) = warnings
        assert warning.startswith(
            f"rank {rank}: EPLB_AGENT_DATA_HOST is 'localhost', a name without a domain"
        )
