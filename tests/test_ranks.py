"""Tests of the rank runner: results in rank order, and a report of every kind of failure."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, Ranks, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError("this rank fails")
    dist.barrier()


def die_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep_on_rank(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def test_results_are_in_rank_order():
    assert run_ranks(2, sum_of_ranks, 10) == [(0, torch.tensor([21])), (1, torch.tensor([21]))]


def test_failures_are_reported_and_the_group_recovers():
    with Ranks(2) as ranks:
        with pytest.raises(RankFailure, match=r"rank 1: Traceback[\s\S]*this rank fails"):
            ranks.run(fail_on_rank, 1)
        with pytest.raises(RankFailure, match="rank 0: died with exit code 7"):
            ranks.run(die_on_rank, 0)
        assert [rank for rank, _ in ranks.run(sum_of_ranks, 0)] == [0, 1]


def test_a_late_rank_is_reported_with_the_deadline():
    with Ranks(2) as ranks:
        ranks.run(sum_of_ranks, 0)
        ranks.deadline = 1.5
        with pytest.raises(RankFailure, match=r"rank 1: did not finish in 1\.5 s"):
            ranks.run(sleep_on_rank, 1, 30.0)
