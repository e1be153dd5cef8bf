"""Every preparation must give each rank what its dispatcher needs, and bring outputs back exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.moe.grid import Grid, grid
from tests.ranks import Ranks
from worker_agent.moe.operators import reference
from worker_agent.moe.prepare import (
    All2AllPreparation,
    AllGatherPreparation,
    MC2Preparation,
    Preparation,
    Prepared,
    SequenceParallelPreparation,
    Tokens,
)
from worker_agent.moe.rank_group import RankGroup

H, E = 6, 4
COUNTS = st.lists(st.integers(0, 7), min_size=4, max_size=4)


def tokens_of(seed: int, count: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    return Tokens(
        torch.randn(count, H, generator=generator), (torch.randn(count, E, generator=generator) + 10,)
    )


def check_padding(prepared: Prepared[Any]) -> None:
    """Logits of real tokens are never zero here."""
    (logits_TE,) = prepared.routing
    real_T = (logits_TE != 0).all(dim=1)
    expected_T = torch.ones_like(real_T) if prepared.active_T is None else prepared.active_T
    assert torch.equal(real_T, expected_T)


def round_trip(preparation: Preparation[Any], tokens: Tokens, parts: int, part: int) -> Prepared[Any]:
    """Prepare, let each of ``parts`` ranks answer for every ``parts``-th token, finalize: that is what came in."""
    prepared = preparation.prepare(tokens)
    check_padding(prepared)
    mine_T = torch.arange(prepared.hidden_TH.shape[0]) % parts == part
    partial_TH = prepared.hidden_TH * mine_T.unsqueeze(1)
    restored_TH = preparation.finalize(partial_TH, prepared.metadata)
    assert torch.equal(restored_TH, tokens.hidden_TH)
    return prepared


def sliced_over_tp(counts: list[int], kind: str) -> tuple[int, int] | None:
    """4 data-parallel groups of 2 ranks with the same tokens; real tokens of this rank and of its slice."""
    here: Grid = grid(tp=2)
    count = counts[here.dp_rank]
    tokens = tokens_of(here.dp_rank, count)
    preparation = All2AllPreparation(here.tp) if kind == "all2all" else MC2Preparation(here.ep, here.tp)
    prepared = round_trip(preparation, tokens, 1, 0)
    (logits_TE,) = prepared.routing
    own = tokens.routing[0][prepared.source]
    assert torch.equal(logits_TE[: own.shape[0]], own)
    if count and count % 2 == 0:
        finalized = preparation.finalize(prepared.hidden_TH, prepared.metadata)
        assert finalized.untyped_storage().data_ptr() != tokens.hidden_TH.untyped_storage().data_ptr()
    return prepared.hidden_TH.shape[0], own.shape[0]


@given(counts=COUNTS, kind=st.sampled_from(["all2all", "mc2"]))
@example(counts=[0, 0, 0, 0], kind="mc2")
@example(counts=[0, 1, 0, 0], kind="all2all")
@example(counts=[0, 1, 0, 0], kind="mc2")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_of_all_ranks_are_the_tokens(eight_ranks: Ranks, counts: list[int], kind: str):
    results = eight_ranks.run(sliced_over_tp, counts, kind)
    for group, count in enumerate(counts):
        parts = results[2 * group : 2 * group + 2]
        assert sum(real for _, real in parts) == count
        assert len({length for length, _ in parts}) == 1
    if kind == "mc2":
        lengths = {length for length, _ in results}
        assert lengths == {max(1, -(-max(counts) // 2))}


def gathered_over(counts: list[int], kind: str) -> list[float] | None:
    """The first hidden value of every token that this rank prepares to dispatch, padding left out."""
    here: Grid = grid(tp=2)
    if kind == "data-parallel":
        # Every rank of a tensor-parallel pair has the same tokens and answers for half of all of them.
        tokens = tokens_of(here.dp_rank, counts[here.dp_rank])
        preparation: Preparation[Any] = AllGatherPreparation([here.dp], here.tp)
        answer = (8, dist.get_rank())
    elif kind == "context-parallel":
        tokens = tokens_of(dist.get_rank(), counts[here.dp_rank] + here.tp.rank)
        preparation = AllGatherPreparation([here.dp, here.tp])
        answer = (8, dist.get_rank())
    else:
        tokens = tokens_of(dist.get_rank(), counts[here.dp_rank] * here.tp.rank)
        preparation = SequenceParallelPreparation(here.ep)
        answer = (8, dist.get_rank())
    prepared = round_trip(preparation, tokens, *answer)
    assert prepared.active_T is not None
    return prepared.hidden_TH[prepared.active_T][:, 0].tolist()


@given(counts=COUNTS, kind=st.sampled_from(["data-parallel", "context-parallel", "sequence-parallel"]))
@example(counts=[0, 0, 0, 0], kind="data-parallel")
@example(counts=[0, 0, 1, 0], kind="sequence-parallel")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gathering_gives_every_rank_the_tokens_of_all(eight_ranks: Ranks, counts: list[int], kind: str):
    results = eight_ranks.run(gathered_over, counts, kind)
    assert all(one == other for one, other in pairwise(results))
    expected = {
        "data-parallel": [tokens_of(group, count) for group, count in enumerate(counts)],
        "context-parallel": [
            tokens_of(2 * g + r, count + r) for r in range(2) for g, count in enumerate(counts)
        ],
        "sequence-parallel": [
            tokens_of(2 * g + r, count * r) for g, count in enumerate(counts) for r in range(2)
        ],
    }[kind]
    assert results[0] == torch.cat([tokens.hidden_TH for tokens in expected])[:, 0].tolist()


def quantized_gather(counts: list[int]) -> None:
    here: Grid = grid(tp=2)
    tokens = tokens_of(dist.get_rank(), counts[dist.get_rank() % 4])
    preparation = SequenceParallelPreparation(here.ep, quantize_with=reference)
    prepared = preparation.prepare(tokens)
    check_padding(prepared)
    assert prepared.hidden_TH.dtype == torch.int8
    assert prepared.scale_T is not None
    assert prepared.active_T is not None
    everybody = [tokens_of(rank, counts[rank % 4]).hidden_TH for rank in range(8)]
    int8_NH, scale_N = reference.npu_dynamic_quant(torch.cat(everybody))
    assert torch.equal(prepared.hidden_TH[prepared.active_T], int8_NH)
    assert torch.equal(prepared.scale_T[prepared.active_T], scale_N)
    out_TH = preparation.finalize(prepared.hidden_TH * prepared.scale_T.unsqueeze(1) / 8, prepared.metadata)
    assert out_TH.dtype == tokens.hidden_TH.dtype
    torch.testing.assert_close(out_TH, tokens.hidden_TH, atol=0.05, rtol=0)


def test_tokens_can_be_quantized_before_they_are_gathered(eight_ranks: Ranks):
    eight_ranks.run(quantized_gather, [3, 0, 1, 5])


ALONE = RankGroup(None)


@pytest.mark.parametrize(
    "preparation",
    [
        All2AllPreparation(ALONE),
        MC2Preparation(ALONE, ALONE),
        AllGatherPreparation([ALONE], ALONE),
        SequenceParallelPreparation(ALONE),
    ],
    ids=["all2all", "mc2", "allgather", "sequence-parallel"],
)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_rank_alone(preparation: Preparation[Any], count: int):
    round_trip(preparation, tokens_of(0, count), 1, 0)


def test_the_padded_shape_is_reported():
    assert MC2Preparation(ALONE, ALONE).prepare(tokens_of(0, 5), length=9).padded_shape == (9, H)
    assert All2AllPreparation(ALONE).prepare(tokens_of(0, 5)).padded_shape is None


def test_more_tokens_than_the_common_length_are_refused():
    with pytest.raises(ValueError, match="MC2: 5 tokens are more than the step's common length of 4"):
        MC2Preparation(ALONE, ALONE).prepare(tokens_of(0, 5), length=4)


def kept_whole() -> None:
    here: Grid = grid(tp=2)
    tokens = tokens_of(dist.get_rank(), 3 + dist.get_rank())
    for preparation in (
        All2AllPreparation(here.tp, whole=True),
        MC2Preparation(here.ep, here.tp, whole=True),
    ):
        prepared = round_trip(preparation, tokens, 1, 0)
        assert prepared.hidden_TH.shape[0] >= 3 + dist.get_rank()
        assert prepared.source == slice(None)


def test_tokens_may_be_kept_whole(eight_ranks: Ranks):
    eight_ranks.run(kept_whole)
