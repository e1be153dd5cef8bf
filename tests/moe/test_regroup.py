"""Tests that a layer that has moved to a different group of ranks behaves like a layer that was created there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from eplb_lab.layer import seeded_experts
from eplb_lab.layer.compose import LayerOptions
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import Case, layer_on
from tests.moe.simulated import Exchange, SimulatedGroup, run_simulated

CASE = Case("all2allv", experts=6, slots=4, top_k=2, tokens=(5, 0, 3), biased=True, seed=4)
TABLES = ("expert_map", "log2phy", "moe_load", "source_load", "load_counter")


def made(case: Case, group: RankGroup, **more: object):
    return layer_on(case, group, biases=case.biases, log2phy_E=None, **more)


@pytest.mark.parametrize("split", ["tables", "step"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("tokens", "slots"), [((5, 2), 3), ((4, 1, 2, 3), 2)], ids=["fewer ranks", "more ranks"]
)
def test_a_layer_regrouped_to_more_or_fewer_ranks_equals_a_new_one(tokens, slots, split, quantized):
    first = replace(CASE, quantized=quantized, biased=not quantized)
    new_case = replace(first, tokens=tokens, slots=slots)
    options = LayerOptions(split=split)
    width = 1 if split == "step" else 2
    old = Exchange(first.ranks)
    new = Exchange(new_case.ranks)

    def steps(all_ranks: RankGroup) -> None:
        rank = all_ranks.rank
        # A joining rank previously served its layer on a single rank.
        alone = replace(first, tokens=(1,), slots=first.experts)
        before, start = (first, SimulatedGroup(old, rank)) if rank < first.ranks else (alone, RankGroup(None))
        layer = made(before, start, dealing_width=width, options=options)
        layer(*before.step(start.rank))
        if rank >= new_case.ranks:
            return
        group = SimulatedGroup(new, rank, "other")
        new_layer = made(new_case, group, dealing_width=width, options=options)
        experts = seeded_experts(new_case.shape, new_case.seed)
        layer.regroup(group, new_case.placement(), experts, biases=new_case.biases)
        assert (layer.ep_rank, layer.ep_size) == (rank, new_case.ranks)
        assert list(layer.state_dict()) == list(new_layer.state_dict())
        for name in TABLES:
            assert torch.equal(getattr(layer, name), getattr(new_layer, name)), name
        for weight, new_weight in zip(layer.expert_weights(), new_layer.expert_weights(), strict=True):
            assert torch.equal(weight, new_weight)
        tokens_TH = new_case.step(rank)
        out_TH = layer(*tokens_TH)
        expected_TH = new_layer(*tokens_TH)
        torch.testing.assert_close(out_TH, expected_TH)
        assert int(layer.load_counter) == 1
        assert torch.equal(layer.moe_load, new_layer.moe_load)

    run_simulated(max(first.ranks, new_case.ranks), steps)


ALONE = replace(CASE, experts=4, tokens=(3,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phy2log_RS": np.zeros((2, 2), dtype=np.int32)}, "phy2log must have shape"),
        ({"biases": None}, "pass biases if, and only if, the layer has biases"),
        ({"experts": seeded_experts(replace(ALONE, hidden=9).shape)}, "must have shape"),
        ({"options": LayerOptions(split="dice")}, "got 'dice'"),
    ],
)
def test_a_rejected_regroup_leaves_the_layer_unchanged(change, message):
    layer = made(ALONE, RankGroup(None))
    before = layer(*ALONE.step(0))
    tables = layer.log2phy.data_ptr()
    arguments = {
        "phy2log_RS": ALONE.placement(),
        "experts": seeded_experts(ALONE.shape, ALONE.seed),
        "biases": ALONE.biases,
    }
    with pytest.raises(ValueError, match=message):
        layer.regroup(None, **arguments | change)
    assert torch.equal(layer(*ALONE.step(0)), before)
    assert layer.log2phy.data_ptr() == tables


def test_process_groups_of_the_old_ranks_are_rejected():
    layer = made(ALONE, RankGroup(None), options=LayerOptions(tp_group=RankGroup(None)))
    arguments = ALONE.placement(), seeded_experts(ALONE.shape, ALONE.seed)
    with pytest.raises(ValueError, match="layer 3: tp_group and dp_groups belong to the old group"):
        layer.regroup(None, *arguments, biases=ALONE.biases)
    layer.regroup(None, *arguments, biases=ALONE.biases, options=LayerOptions())
    torch.testing.assert_close(layer(*ALONE.step(0)), made(ALONE, RankGroup(None))(*ALONE.step(0)))
