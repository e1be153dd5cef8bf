"""What the batched format has room for is served as ever; what it has not is refused before any exchange."""

from __future__ import annotations

import pytest
import torch

from tests.moe.cases import MC2_VARIANTS, Case, alone
from tests.moe.simulated import run_simulated
from worker_agent.moe import DenseMoE, ExpertParallelMoE, LayerOptions, seeded_experts
from worker_agent.moe.dispatch import MC2Variant
from worker_agent.moe.prepare import (
    All2AllPreparation,
)
from worker_agent.moe.rank_group import RankGroup


def test_no_token_chooses_an_expert_twice_in_the_batched_format():
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(3,))
    hidden_TH, ids_TK, weights_TK = case.step(0)
    ids_TK[1] = 3
    with pytest.raises(
        ValueError, match=r"layer 3: topk_ids must have distinct experts.*got \[3, 3\] at token 1"
    ):
        alone(case, LayerOptions(max_rank_tokens=3))(hidden_TH, ids_TK, weights_TK)
    alone(case)(hidden_TH, ids_TK, weights_TK)


def test_masked_choices_may_repeat_an_expert_in_the_batched_format():
    case = Case("all2allv", experts=4, slots=4, top_k=3, tokens=(2,))
    hidden_TH, _, weights_TK = case.step(0)
    ids_TK = torch.tensor([[0, 0, 3], [1, 0, 1]])
    active_TK = torch.tensor([[True, False, True], [True, True, False]])
    found_TH = alone(case, LayerOptions(max_rank_tokens=2))(hidden_TH, ids_TK, weights_TK, active=active_TK)
    dense = DenseMoE(case.shape, seeded_experts(case.shape))
    torch.testing.assert_close(found_TH, dense(hidden_TH, ids_TK, weights_TK * active_TK))


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
def test_padding_that_a_batch_has_no_room_for_is_refused(variant: MC2Variant):
    case = Case("mc2", experts=4, slots=4, top_k=2, tokens=(3,))
    layer = alone(case, LayerOptions(max_rank_tokens=4, mc2=variant))
    dense = DenseMoE(case.shape, seeded_experts(case.shape))
    torch.testing.assert_close(layer(*case.step(0), length=4), dense(*case.step(0)))
    with pytest.raises(ValueError, match=r"layer 3: 5 tokens, padding among them, are more than the 4"):
        layer(*case.step(0), length=5)


def test_a_batch_has_room_for_each_tensor_parallel_ranks_slice():
    def one_step(group: RankGroup) -> torch.Tensor:
        case = Case("all2allv", experts=4, slots=2, top_k=2, tokens=(8, 8))
        options = LayerOptions(max_rank_tokens=4, preparations={"all2allv": All2AllPreparation(group)})
        layer = ExpertParallelMoE(
            case.shape, case.placement(), seeded_experts(case.shape), ep_group=group, options=options
        )
        expected_TH = DenseMoE(case.shape, seeded_experts(case.shape))(*case.step(0))
        difference: torch.Tensor = (layer(*case.step(0)) - expected_TH).abs().max()
        return difference

    assert max(run_simulated(2, one_step)) <= 1e-5
