"""Tests that the fused exchanges send rows to their experts, skip masked tokens, and return all results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from eplb_lab.layer.operators import reference
from eplb_lab.layer.rank_group import RankGroup
from tests.ranks import Ranks

ALONE = ("", 1, 0)


def tokens_and_ids(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(3)])
    return torch.randn(3, 5, generator=generator), ids_TK


DISPATCH = reference.npu_moe_distribute_dispatch_v2
COMBINE = reference.npu_moe_distribute_combine_v2


@pytest.mark.parametrize(("kind", "expected"), [(0, [1, 1, 3, 4]), (1, [1, 0, 2, 1])])
def test_masked_tokens_are_neither_sent_nor_counted(kind: int, expected: list[int]):
    hidden_TH = torch.arange(15.0).view(3, 5)
    ids_TK = torch.tensor([[2, 0], [1, 3], [2, 3]])
    mask_T = torch.tensor([True, False, True])
    dispatched = DISPATCH(hidden_TH, ids_TK, *ALONE, 4, x_active_mask=mask_T, expert_token_nums_type=kind)
    rows_AH, _, assist_info, tokens_S, counts = dispatched[:5]
    assert tokens_S.tolist() == expected
    assert torch.equal(
        rows_AH, torch.stack([hidden_TH[0], hidden_TH[0], hidden_TH[2], hidden_TH[2], *torch.zeros(2, 5)])
    )
    weights_TK = torch.tensor([[0.5, 0.25], [9.0, 9.0], [1.0, 2.0]])
    combined_TH = COMBINE(rows_AH, ids_TK, assist_info, counts, weights_TK, *ALONE, 4, x_active_mask=mask_T)
    assert torch.equal(combined_TH, torch.stack([0.75 * hidden_TH[0], torch.zeros(5), 3.0 * hidden_TH[2]]))


def test_each_row_carries_its_weight_in_a_two_level_dispatch():
    hidden_TH, ids_TK = tokens_and_ids()
    weights_TK = torch.arange(6.0).view(3, 2)
    dispatched = DISPATCH(hidden_TH, ids_TK, *ALONE, 4, expert_scales=weights_TK)
    order = ids_TK.flatten().argsort(stable=True)
    assert torch.equal(dispatched[6], weights_TK.flatten()[order])


def rows_by_source(experts: int) -> tuple[list[list[float]], list[int]]:
    """Return the rows that arrive here, each marked with its source rank and token, and their cumulative counts."""
    group = RankGroup(dist.group.WORLD)
    tokens = torch.arange(2.0)
    marked_TH = torch.stack([torch.full((2,), float(group.rank)), tokens], dim=1)
    ids_TK = torch.tensor([[group.rank, experts - 1], [experts - 1, 0]])
    dispatched = DISPATCH(marked_TH, ids_TK, group.name, group.size, group.rank, experts)
    return dispatched[0].tolist(), dispatched[4].tolist()


def test_rows_are_ordered_by_expert_and_then_by_source(eight_ranks: Ranks):
    results = eight_ranks.run(rows_by_source, 16)
    rows, counts = results[0]
    # Token 0 of each rank chooses the expert with the rank's number, token 1 chooses expert 0, and both choose the last
    # expert. Expert 0 therefore receives two rows from rank 0 and one from every other rank. Expert 1 receives token 0
    # of rank 1.
    assert rows[:10] == [[0, 0], [0, 1], *([rank, 1] for rank in range(1, 8)), [1, 0]]
    assert counts == [2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 10, 10, 10, 10, 10, 10]
    rows, counts = results[7]
    assert rows[:16] == [[rank, token] for rank in range(8) for token in range(2)]
    assert counts[-1] == 16


SPLIT_FURTHER = {"tp_world_size": 2}, {"tp_world_size": 1, "group_tp": "other"}, {"shared_expert_rank_num": 1}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [*((1, arguments) for arguments in (*SPLIT_FURTHER, {"global_bs": 2}, {"quant_mode": 1})), (2, {})],
)
def test_unsupported_dispatch_arguments_are_rejected(ranks: int, more: dict[str, object]):
    hidden_TH, ids_TK = tokens_and_ids()
    with pytest.raises(
        ValueError, match=r"reference operator: |received 6 rows, but global_bs allows only 4"
    ):
        DISPATCH(hidden_TH, ids_TK, "", ranks, 0, 4, **more)


@pytest.mark.parametrize("arguments", [*SPLIT_FURTHER, {"tp_world_size": 1}], ids=str)
def test_combine_requires_the_assist_info_of_its_dispatch(arguments: dict[str, object]):
    hidden_TH, ids_TK = tokens_and_ids()
    rows_AH, _, assist_info, _, counts, _, _ = DISPATCH(hidden_TH, ids_TK, *ALONE, 4)
    with pytest.raises(ValueError, match=r"reference operator: |must be the sixth result of dispatch"):
        COMBINE(rows_AH, ids_TK, assist_info, counts, torch.ones(3, 2), *ALONE, 4, **arguments)


def test_double_precision_rows_are_summed_in_double_precision():
    hidden_TH = torch.full((2, 3), 1.0 + 2.0**-40, dtype=torch.float64)
    ids_TK = torch.tensor([[0, 1], [1, 0]])
    rows_AH, _, assist_info, _, counts = DISPATCH(hidden_TH, ids_TK, *ALONE, 2)[:5]
    combined_TH = COMBINE(rows_AH, ids_TK, assist_info, counts, torch.full((2, 2), 0.5), *ALONE, 2)
    assert torch.equal(combined_TH, hidden_TH)
