"""Every preparation must give each rank what its dispatcher needs, and bring outputs back exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.moe.simulated import SimulatedGroup, run_simulated
from worker_agent.moe.prepare import (
    All2AllPreparation,
    AllGatherPreparation,
    MC2Preparation,
    Preparation,
    Prepared,
)
from worker_agent.moe.rank_group import RankGroup

H, E = 6, 4
Tokens = tuple[torch.Tensor, tuple[torch.Tensor]]
COUNTS = st.lists(st.integers(0, 7), min_size=4, max_size=4)


def tokens_of(seed: int, count: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, generator=generator), (torch.randn(count, E, generator=generator) + 10,)


def check_padding(prepared: Prepared) -> None:
    """Logits of real tokens are never zero here."""
    (logits_TE,) = prepared.routing
    real_T = (logits_TE != 0).all(dim=1)
    expected_T = torch.ones_like(real_T) if prepared.active_T is None else prepared.active_T
    assert torch.equal(real_T, expected_T)


def round_trip(preparation: Preparation, tokens: Tokens, parts: int, part: int) -> Prepared:
    """Prepare, let each of ``parts`` ranks answer for every ``parts``-th token, finalize: that is what came in."""
    prepared = preparation.prepare(*tokens)
    check_padding(prepared)
    mine_T = torch.arange(prepared.hidden_TH.shape[0]) % parts == part
    partial_TH = prepared.hidden_TH * mine_T.unsqueeze(1)
    restored_TH = prepared.finalize(partial_TH)
    assert torch.equal(restored_TH, tokens[0])
    return prepared


def sliced_over_tp(ep: SimulatedGroup, counts: list[int], kind: str) -> tuple[int, int]:
    """4 data-parallel groups of 2 ranks with the same tokens; real tokens of this rank and of its slice."""
    _, tp = ep.grid(2)
    count = counts[ep.rank // 2]
    tokens = tokens_of(ep.rank // 2, count)
    preparation = All2AllPreparation(tp) if kind == "all2all" else MC2Preparation(ep, tp)
    prepared = round_trip(preparation, tokens, 1, 0)
    (logits_TE,) = prepared.routing
    own = tokens[1][0][prepared.source]
    assert torch.equal(logits_TE[: own.shape[0]], own)
    if count and count % 2 == 0:
        finalized = prepared.finalize(prepared.hidden_TH)
        assert finalized.untyped_storage().data_ptr() != tokens[0].untyped_storage().data_ptr()
    return prepared.hidden_TH.shape[0], own.shape[0]


@given(counts=COUNTS, kind=st.sampled_from(["all2all", "mc2"]))
@example(counts=[0, 0, 0, 0], kind="mc2")
@example(counts=[0, 1, 0, 0], kind="all2all")
@example(counts=[0, 1, 0, 0], kind="mc2")
@settings(max_examples=15, deadline=None)
def test_slices_of_all_ranks_are_the_tokens(counts: list[int], kind: str):
    results = run_simulated(8, lambda ep: sliced_over_tp(ep, counts, kind))
    for group, count in enumerate(counts):
        parts = results[2 * group : 2 * group + 2]
        assert sum(real for _, real in parts) == count
        assert len({length for length, _ in parts}) == 1
    if kind == "mc2":
        lengths = {length for length, _ in results}
        assert lengths == {max(1, -(-max(counts) // 2))}


def gathered_over(ep: SimulatedGroup, counts: list[int], kind: str) -> list[float]:
    """The first hidden value of every token that this rank prepares to dispatch, padding left out."""
    dp, tp = ep.grid(2)
    preparation: Preparation
    if kind == "data-parallel":
        # Every rank of a tensor-parallel pair has the same tokens and answers for half of all of them.
        tokens, preparation = tokens_of(dp.rank, counts[dp.rank]), AllGatherPreparation([dp], tp)
    elif kind == "context-parallel":
        tokens, preparation = tokens_of(ep.rank, counts[dp.rank] + tp.rank), AllGatherPreparation([dp, tp])
    else:
        tokens, preparation = tokens_of(ep.rank, counts[dp.rank] * tp.rank), AllGatherPreparation([ep])
    prepared = round_trip(preparation, tokens, 8, ep.rank)
    assert prepared.active_T is not None
    return prepared.hidden_TH[prepared.active_T][:, 0].tolist()


@given(counts=COUNTS, kind=st.sampled_from(["data-parallel", "context-parallel", "sequence-parallel"]))
@example(counts=[0, 0, 0, 0], kind="data-parallel")
@example(counts=[0, 0, 1, 0], kind="sequence-parallel")
@settings(max_examples=20, deadline=None)
def test_gathering_gives_every_rank_the_tokens_of_all(counts: list[int], kind: str):
    results = run_simulated(8, lambda ep: gathered_over(ep, counts, kind))
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
    assert results[0] == torch.cat([tokens[0] for tokens in expected])[:, 0].tolist()


def test_more_tokens_than_the_common_length_are_refused():
    with pytest.raises(ValueError, match="MC2: 5 tokens are more than the step's common length of 4"):
        MC2Preparation(RankGroup(None), RankGroup(None)).prepare(*tokens_of(0, 5), length=4)
