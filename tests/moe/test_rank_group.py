"""Tests that all of a rank group's exchange implementations give the same results, in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import ep_group
from tests.moe.simulated import run_simulated
from tests.ranks import Ranks

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool]


def rows_of(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, 3, 2, generator=generator) * 9).to(dtype)


def gathered(ranks: int, rows: int, by_backend: bool) -> list[torch.Tensor] | None:
    """Gather over gloo, using the backend's own gather (as on a device) if ``by_backend`` is set."""
    process_group = ep_group(ranks)
    if process_group is None or dist.get_rank() >= ranks:
        return None
    group = RankGroup(process_group)
    exchanges = []
    all_to_all = group.all_to_all
    group.all_to_all = lambda *args: exchanges.append(args) or all_to_all(*args)  # type: ignore[method-assign]
    group._gathers = lambda device: by_backend  # type: ignore[method-assign]
    rows_by_dtype = [group.all_gather(rows_of(group.rank, rows, dtype).transpose(1, 2)) for dtype in DTYPES]
    assert len(exchanges) == (0 if by_backend else len(DTYPES))
    return rows_by_dtype


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_gather_by_the_backend_equals_a_gather_by_exchanges(eight_ranks: Ranks, ranks: int, rows: int):
    for by_backend in (False, True):
        for rows_by_dtype in eight_ranks.run(gathered, ranks, rows, by_backend)[:ranks]:
            assert rows_by_dtype is not None
            for rows_NX, dtype in zip(rows_by_dtype, DTYPES, strict=True):
                wanted_NX = torch.cat([rows_of(rank, rows, dtype).transpose(1, 2) for rank in range(ranks)])
                assert torch.equal(rows_NX, wanted_NX)


def neighbours() -> list[list[int]]:
    """Return the ranks in this rank's data-parallel and tensor-parallel groups when four ranks share tokens."""
    own_rank = torch.tensor([dist.get_rank()])
    return [group.all_gather(own_rank).tolist() for group in RankGroup(ep_group(8)).grid(4)]


def test_consecutive_ranks_share_tokens(eight_ranks: Ranks):
    expected_neighbours = [
        [[rank % 4, 4 + rank % 4], [*range(rank - rank % 4, rank - rank % 4 + 4)]] for rank in range(8)
    ]
    assert eight_ranks.run(neighbours) == expected_neighbours
    with pytest.raises(ValueError, match="1 ranks cannot be split evenly into tensor-parallel groups of 2"):
        RankGroup(None).grid(2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_bitwise_equal_on_all_ranks_and_receives_at_most_two_copies(
    ranks: int, rows: int, dtype: torch.dtype
):
    def summed(group: RankGroup) -> tuple[torch.Tensor, int]:
        received = []
        start = group.start_all_to_all

        def counted(rows_NX: torch.Tensor, sent: list[int], arriving: list[int]) -> object:
            received.append(sum(arriving))
            return start(rows_NX, sent, arriving)

        group.start_all_to_all = counted  # type: ignore[assignment, method-assign]
        return group.all_reduce(rows_of(group.rank, rows, dtype)), sum(received)

    wanted_NX = torch.stack([rows_of(rank, rows, dtype) for rank in range(ranks)]).sum(dim=0)
    results = run_simulated(ranks, summed)
    torch.testing.assert_close(results[0][0], wanted_NX)
    for found_NX, received in results:
        assert torch.equal(found_NX, results[0][0])
        assert received <= 2 * (rows + ranks - 1)


def test_rows_of_a_device_are_gathered_by_its_backend():
    alone = RankGroup(None)
    several = RankGroup.__new__(RankGroup)
    several._group = object()  # type: ignore[assignment]
    cpu = torch.device("cpu")
    device = torch.device("cuda")
    assert [several._gathers(cpu), several._gathers(device), alone._gathers(device)] == [False, True, False]
