"""Parts and tokens that do not fit a layer are refused; masks, weights on the input and variants change no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.moe.cases import MC2_VARIANTS, Case, alone, layer_on
from tests.moe.simulated import run_simulated
from worker_agent.moe import LayerOptions
from worker_agent.moe.compose import LayerPath
from worker_agent.moe.dispatch import MC2Variant
from worker_agent.moe.operators import reference
from worker_agent.moe.prepare import All2AllPreparation, AllGatherPreparation
from worker_agent.moe.rank_group import RankGroup

OWN = {"preparations": {"allgather": AllGatherPreparation([RankGroup(None)])}}
UNUSED = {"preparations": {"all2all": All2AllPreparation(RankGroup(None))}}
EARLY = {"quantize_before_gather": True}


@pytest.mark.parametrize(
    ("dispatcher", "quantized", "options", "message"),
    [
        ("all2allv", True, {"max_rank_tokens": 3}, "takes floating-point weights alone"),
        ("all2allv", False, {"max_rank_tokens": 0}, "room for one token per rank, got 0"),
        ("allgather", False, EARLY, "this one's weights are floating-point"),
        ("mc2", True, EARLY, "a default preparation, got mc2$"),
        ("allgather", True, EARLY | OWN, "a default preparation, got allgather$"),
        ("mc2", False, UNUSED, "preparations are given for all2all, dispatchers are mc2"),
        ([], False, {}, "a layer needs at least one dispatcher"),
        ("all2allv", False, {"split": "steps"}, "split is 'steps'; use one of tables, step"),
    ],
)
def test_parts_that_do_not_fit_together(
    dispatcher: Any, quantized: bool, options: dict[str, Any], message: str
):
    case = Case("mc2", 4, 4, 2, (3,), quantized=quantized)
    with pytest.raises(ValueError, match=message):
        alone(case, LayerOptions(**options), dispatcher=dispatcher)


def test_one_choice_alone_is_weighed_on_the_input():
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(3,))
    with pytest.raises(ValueError, match=r"layer 3: weights can be applied .* one choice .*got 2"):
        alone(case, LayerOptions(weigh_on_input=True))(*case.step(0))


def test_mc2_takes_no_expert_twice_and_no_more_tokens_than_its_operators():
    case = Case("mc2", experts=4, slots=2, top_k=3, tokens=(3, 3))

    def one_step(group: RankGroup) -> None:
        layer = layer_on(case, group, dispatcher=("mc2", "all2allv"))
        hidden_TH, ids_TK, weights_TK = case.step(group.rank)
        ids_TK[1] = torch.tensor([3, 0, 3])
        with pytest.raises(ValueError, match=r"layer 3: topk_ids .*distinct.* got \[3, 0, 3\] at token 1"):
            layer(hidden_TH, ids_TK, weights_TK)
        expected_TH = case.dense()(hidden_TH, ids_TK, weights_TK)
        torch.testing.assert_close(layer(hidden_TH, ids_TK, weights_TK, dispatcher="all2allv"), expected_TH)

    run_simulated(2, one_step)
    npu: Any = SimpleNamespace(type="npu")
    path = LayerPath.of("mc2", RankGroup(None), 4, reference, npu, LayerOptions(mc2=MC2Variant()))
    path.check_room(3, 512)
    with pytest.raises(ValueError, match="layer 3: 513 tokens, padding among them, are more than the 512"):
        path.check_room(3, 513)


def test_a_grouped_token_with_more_than_its_share_on_a_rank_is_not_a_number():
    """Where ids are not checked, as on a device, an expert that has left its group must not go unnoticed."""
    case = Case("moge", experts=4, slots=2, top_k=2, tokens=(2, 2))

    def one_step(group: RankGroup) -> torch.Tensor:
        in_order_RS = np.arange(4, dtype=np.int32).reshape(2, 2)
        layer = layer_on(case, group, phy2log_RS=in_order_RS, log2phy_E=None, check_ids=False)
        layer.log2phy[1], layer.log2phy[2] = 2, 1
        ids_TK = torch.tensor([[0, 2], [0, 3]])
        out_TH: torch.Tensor = layer(torch.ones(2, 8), ids_TK, torch.ones(2, 2))
        return out_TH

    for out_TH in run_simulated(2, one_step):
        assert out_TH[0].isnan().all()
        assert not out_TH[1].isnan().any()


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
def test_mc2_with_choices_masked_one_by_one_stays_within_its_buffers(variant: MC2Variant):
    case = Case("mc2", experts=8, slots=4, top_k=6, tokens=(32, 32))

    def one_step(group: RankGroup) -> float:
        tokens = case.step(group.rank)
        active_TK = torch.rand(32, 6, generator=torch.Generator().manual_seed(group.rank)) < 0.3
        layer = layer_on(case, group, dispatcher="mc2", options=LayerOptions(mc2=variant))
        expected_TH = case.dense()(tokens[0], tokens[1], tokens[2] * active_TK)
        return float((layer(*tokens, active=active_TK) - expected_TH).abs().max())

    assert max(run_simulated(2, one_step)) <= 1e-5
