"""Tests that a block routes as its model defines, and that free experts are neither dispatched nor counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_core.heat.phase import StepPhase
from eplb_lab.layer import MoEBlock, Router
from eplb_lab.layer.block import FreeExpert
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.router import balanced_choices, grouped_routing
from tests.moe.cases import Case, alone, layer_on, shared_of
from tests.moe.simulated import run_simulated

CASE = Case("all2allv", experts=6, slots=6, top_k=3, tokens=(12,))


def logits(experts: int) -> torch.Tensor:
    return torch.randn(12, experts, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", [(12, 8), (3, 4, 8), (12, 1, 8)])
def test_outputs_have_the_shape_of_the_tokens(shape: tuple[int, ...]):
    block = MoEBlock(Router(experts=6, top_k=3), alone(CASE))
    hidden_TH = CASE.step(0)[0]
    out = block(hidden_TH.view(shape), logits(6).view(*shape[:-1], 6))
    weights_TK, ids_TK = block.router(logits(6))
    torch.testing.assert_close(out, CASE.dense()(hidden_TH, ids_TK, weights_TK).view(shape))


@pytest.mark.parametrize("kind", FreeExpert)
@pytest.mark.parametrize("some_padding", [False, True])
def test_free_experts_are_neither_dispatched_nor_counted(kind: FreeExpert, some_padding: bool):
    layer = alone(CASE)
    block = MoEBlock(Router(experts=9, top_k=3), layer, kind)
    hidden_TH = CASE.step(0)[0]
    active_T = torch.arange(12) % 3 != 0 if some_padding else None
    out_TH = block(hidden_TH, logits(9), active_T=active_T)
    weights_TK, ids_TK = block.router(logits(9))
    real_TK = ids_TK < 6
    expected_TH = CASE.dense()(hidden_TH, ids_TK.masked_fill(~real_TK, 0), weights_TK * real_TK)
    if kind is FreeExpert.IDENTITY:
        expected_TH += hidden_TH * (weights_TK * ~real_TK).sum(dim=1, keepdim=True)
    seen_T = torch.ones(12, dtype=torch.bool) if active_T is None else active_T
    torch.testing.assert_close(out_TH, expected_TH.masked_fill(~seen_T.unsqueeze(1), 0.0))
    chosen = ids_TK[real_TK & seen_T.unsqueeze(1)]
    assert not real_TK.all()
    assert layer.source_load is not None
    assert layer.source_load[0].tolist() == torch.bincount(chosen, minlength=6).tolist()
    assert int(layer.moe_load[0].sum()) == chosen.numel()
    assert not block(hidden_TH, logits(9), phase=StepPhase.DUMMY).any()


@pytest.mark.parametrize(("experts", "kind"), [(9, None), (6, FreeExpert.ZERO), (5, None)])
def test_a_router_for_the_wrong_number_of_experts_is_rejected(experts: int, kind: FreeExpert | None):
    with pytest.raises(ValueError, match=f"layer 3: the router chooses among {experts} exp.*layer has 6"):
        MoEBlock(Router(experts, 3), alone(CASE), kind)


@pytest.mark.parametrize("kind", [None, FreeExpert.ZERO])
def test_a_profile_run_is_balanced_and_records_no_heat(kind: FreeExpert | None):
    layer = alone(CASE)
    chosen = []
    layer.register_forward_pre_hook(lambda _, tokens: chosen.append(tokens[1]))
    router = Router(experts=6 if kind is None else 7, top_k=3)
    MoEBlock(router, layer, kind)(CASE.step(0)[0], torch.zeros(12, router.experts), profile=True)
    assert torch.bincount(chosen[0].flatten()).tolist() == [6] * 6
    assert int(layer.load_counter) == 1
    assert not layer.moe_load.any()
    assert not layer.source_load.any()


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_profile_run_of_grouped_experts_is_balanced_within_every_group(tokens: int):
    case = Case("moge", experts=9, slots=3, top_k=3, tokens=(tokens,) * 3)

    def profile(group: RankGroup) -> list[int]:
        layer = layer_on(case, group)
        router = Router(9, 3, custom=grouped_routing(3))
        out_TH = MoEBlock(router, layer)(case.step(group.rank)[0], torch.zeros(tokens, 9), profile=True)
        assert not out_TH.isnan().any()
        return balanced_choices(tokens, 9, 3, torch.device("cpu"), rank=group.rank, groups=3).tolist()

    chosen = torch.tensor(run_simulated(3, profile)).view(-1, 3)
    assert (chosen // 3).sort(dim=1).values.tolist() == [[0, 1, 2]] * (3 * tokens)
    assert torch.bincount(chosen.flatten()).tolist() == [tokens] * 9


def test_a_call_can_select_the_dispatcher_and_the_common_length():
    layer = alone(CASE, dispatcher=("all2allv", "mc2"))
    block = MoEBlock(Router(6, 3), layer)
    hidden_TH = CASE.step(0)[0]
    wanted_TH = block(hidden_TH, logits(6))
    torch.testing.assert_close(block(hidden_TH, logits(6), dispatcher="mc2", length=13), wanted_TH)
    with pytest.raises(ValueError, match=r"dispatcher must be one.*got 'moge'"):
        block(hidden_TH, logits(6), dispatcher="moge")
    with pytest.raises(ValueError, match="MC2: 12 tokens exceed the step's common length of 4"):
        block(hidden_TH, logits(6), dispatcher="mc2", length=4)
    assert int(layer.load_counter) == 2


@pytest.mark.parametrize("kind", FreeExpert)
def test_padding_skips_shared_experts_in_blocks_with_free_experts(kind: FreeExpert):
    layer = alone(CASE, shared_experts=shared_of(CASE))
    active_T = torch.arange(12) % 3 != 0
    out_TH = MoEBlock(Router(9, 3), layer, kind)(CASE.step(0)[0], logits(9), active_T=active_T)
    assert out_TH.any(dim=1).tolist() == active_T.tolist()


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_balanced_choices_are_distinct_and_even(tokens: int):
    ids_TK = balanced_choices(tokens, 6, 4, torch.device("cpu"))
    assert all(len(set(row)) == 4 for row in ids_TK.tolist())
    counts = np.bincount(ids_TK.flatten(), minlength=6)
    assert counts.max() - counts.min() <= 1
    with pytest.raises(ValueError, match=r"top_k must be 1\.\.6"):
        balanced_choices(tokens, 6, 7, torch.device("cpu"))
    with pytest.raises(ValueError, match="6 experts and 4 choices cannot be split evenly into 3 groups"):
        balanced_choices(tokens, 6, 4, torch.device("cpu"), groups=3)


def test_balanced_choices_continue_from_rank_to_rank():
    """With one token on each of eight ranks, all 64 experts are chosen, instead of the same eight on each rank."""
    chosen = [balanced_choices(1, 64, 8, torch.device("cpu"), rank=rank) for rank in range(8)]
    assert sorted(torch.cat(chosen).flatten().tolist()) == list(range(64))
