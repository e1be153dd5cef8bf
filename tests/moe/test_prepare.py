"""Gathering over a layer's groups gives every rank all tokens, and each rank gets back its own tokens' outputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_lab.layer.prepare import AllGatherPreparation
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.simulated import SimulatedGroup, run_simulated

H = 6
E = 4
ALONE = RankGroup(None)
Tokens = tuple[torch.Tensor, tuple[torch.Tensor]]
COUNTS = st.lists(st.integers(0, 7), min_size=4, max_size=4)


def tokens_of(seed: int, count: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, generator=generator), (torch.randn(count, E, generator=generator) + 10,)


def gathered_over(ep: SimulatedGroup, counts: list[int], kind: str) -> list[float]:
    """Return the first hidden value of every token that this rank prepares to dispatch, without padding."""
    dp, tp = ep.grid(2)
    # Both ranks in a tensor-parallel pair have the same tokens, and each is responsible for half of them.
    number, count, preparation = {
        "data-parallel": (dp.rank, counts[dp.rank], AllGatherPreparation([dp], tp)),
        "context-parallel": (ep.rank, counts[dp.rank] + tp.rank, AllGatherPreparation([dp, tp], ALONE)),
        "sequence-parallel": (ep.rank, counts[dp.rank] * tp.rank, AllGatherPreparation([ep], ALONE)),
    }[kind]
    tokens = tokens_of(number, count)
    prepared = preparation.prepare(*tokens)
    assert prepared.active_T is not None
    # Logits of real tokens are never zero in this test.
    assert torch.equal(prepared.active_T, (prepared.routing[0] != 0).all(dim=1))
    mine_T = torch.arange(prepared.hidden_TH.shape[0]) % 8 == ep.rank
    assert torch.equal(prepared.finalize(prepared.hidden_TH * mine_T.unsqueeze(1)), tokens[0])
    return prepared.hidden_TH[prepared.active_T][:, 0].tolist()


@given(counts=COUNTS, kind=st.sampled_from(["data-parallel", "context-parallel", "sequence-parallel"]))
@example(counts=[0, 0, 0, 0], kind="data-parallel")
@example(counts=[0, 0, 1, 0], kind="sequence-parallel")
@settings(max_examples=20, deadline=None)
def test_gathering_gives_every_rank_all_tokens(counts: list[int], kind: str):
    results = run_simulated(8, lambda ep: gathered_over(ep, counts, kind))
    assert all(values == next_values for values, next_values in pairwise(results))
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


def test_more_tokens_than_the_common_length_are_rejected():
    with pytest.raises(ValueError, match="gathering tokens: 5 tokens exceed the step's common length of 4"):
        AllGatherPreparation([ALONE], ALONE).prepare(*tokens_of(0, 5), length=4)
