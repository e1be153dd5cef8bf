"""Tokens and choices that are not real are served nowhere and counted nowhere, and shared ones once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_service.wire.heat import StepPhase
from tests.moe.cases import MC2_VARIANTS, Case, alone, build, hand_counts
from tests.moe.grid import grid
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.ranks import Ranks
from worker_agent.moe import DenseMoE, ExpertParallelMoE, LayerOptions, seeded_experts
from worker_agent.moe.dispatch import DISPATCHER_NAMES, SHARED_TOKEN_DISPATCHERS, MC2Variant
from worker_agent.moe.prepare import (
    All2AllPreparation,
    AllGatherPreparation,
    MC2Preparation,
    Preparation,
)
from worker_agent.moe.rank_group import RankGroup


def over_a_grid(case: Case) -> tuple[float, list[int], list[int]]:
    """The layer over 4 data-parallel groups of 2 ranks with the same tokens."""
    here = grid(tp=2)
    preparation: Preparation[Any]
    if case.dispatcher in SHARED_TOKEN_DISPATCHERS:
        preparation = AllGatherPreparation([here.dp], here.tp)
    elif case.dispatcher == "mc2":
        preparation = MC2Preparation(here.ep, here.tp)
    else:
        preparation = All2AllPreparation(here.tp)
    experts = seeded_experts(case.shape)
    layer = ExpertParallelMoE(
        case.shape,
        case.placement(),
        experts,
        log2phy_E=case.tables()[0 if case.dispatcher in SHARED_TOKEN_DISPATCHERS else here.ep.rank],
        dispatcher=case.dispatcher,
        ep_group=here.ep_process_group,
        options=LayerOptions(preparations={case.dispatcher: preparation}),
    )
    tokens = case.step(here.dp_rank)
    difference = (layer(*tokens) - DenseMoE(case.shape, experts)(*tokens)).abs()
    return (
        float(difference.max()) if difference.numel() else 0.0,
        layer.moe_load[0].tolist(),
        layer.source_load[0].tolist(),
    )


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
def test_ranks_that_share_tokens_count_each_once(eight_ranks: Ranks, dispatcher: str):
    slots, top_k = (4, 8) if dispatcher == "moge" else (5, 4)
    case = Case(dispatcher, 32, slots, top_k, tokens=(3, 0, 1, 6, 0, 0, 0, 0), skew=0.1)
    results = eight_ranks.run(over_a_grid, case)
    assert max(difference for difference, _, _ in results) <= 1e-5
    by_hand_E = np.sum(hand_counts(case)[1], axis=0)
    assert np.sum([source for _, _, source in results], axis=0).tolist() == by_hand_E.tolist()
    assert np.sum([received for _, received, _ in results]) == by_hand_E.sum()


def idle_rank(case: Case) -> tuple[float, list[int], list[int]] | None:
    """Rank 0 makes a dummy step, with tokens that nobody must see."""
    built = build(case)
    if built is None:
        return None
    layer, dense = built
    tokens = case.step(dist.get_rank())
    dummy = dist.get_rank() == 0
    output_TH = layer(*tokens, phase=StepPhase.DUMMY if dummy else StepPhase.DECODE)
    expected_TH = torch.zeros_like(output_TH) if dummy else dense(*tokens)
    return (
        float((output_TH - expected_TH).abs().max()),
        layer.moe_load[0].tolist(),
        layer.source_load[0].tolist(),
    )


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
def test_a_dummy_batch_is_seen_nowhere(eight_ranks: Ranks, dispatcher: str):
    case = Case(dispatcher, experts=4, slots=2, top_k=2, tokens=(3, 4), skew=0.2)
    results = eight_ranks.run(idle_rank, case)[:2]
    assert max(difference for difference, _, _ in results) <= 1e-5
    only_others = [torch.zeros(3, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
    received_RS, source_RE = hand_counts(case, active=only_others)
    assert [source for _, _, source in results] == source_RE.tolist()
    assert [received for _, received, _ in results] == received_RS.tolist()


def test_choices_may_be_masked_one_by_one():
    case = Case("all2allv", experts=4, slots=4, top_k=3, tokens=(5,))
    layer = alone(case)
    hidden_TH, ids_TK, weights_TK = case.step(0)
    active_TK = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    expected_TH = DenseMoE(case.shape, seeded_experts(case.shape))(hidden_TH, ids_TK, weights_TK * active_TK)
    torch.testing.assert_close(layer(hidden_TH, ids_TK, weights_TK, active=active_TK), expected_TH)
    assert layer.source_load[0].tolist() == torch.bincount(ids_TK[active_TK], minlength=4).tolist()


@pytest.mark.parametrize(
    ("active", "message"),
    [
        (torch.ones(4, dtype=torch.bool), r"active must have the shape \[5\] or \[5, 3\], got \[4\]"),
        (torch.ones(5), "active must have the dtype torch.bool, got torch.float32"),
        (torch.ones(5, dtype=torch.bool, device="meta"), "active must have the layer's device cpu, got meta"),
    ],
)
def test_a_mask_that_does_not_fit(active: torch.Tensor, message: str):
    case = Case("all2allv", experts=4, slots=4, top_k=3, tokens=(5,))
    with pytest.raises(ValueError, match=f"layer 3: {message}"):
        alone(case)(*case.step(0), active=active)


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
def test_mc2_with_choices_masked_one_by_one_stays_within_its_buffers(
    variant: MC2Variant, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)
    case = Case("mc2", experts=8, slots=4, top_k=6, tokens=(32, 32))

    def one_step(group: RankGroup) -> float:
        tokens = case.step(group.rank)
        active_TK = torch.rand(32, 6, generator=torch.Generator().manual_seed(group.rank)) < 0.3
        layer = ExpertParallelMoE(
            case.shape,
            case.placement(),
            seeded_experts(case.shape),
            dispatcher="mc2",
            ep_group=group,
            options=LayerOptions(mc2=variant),
        )
        dense = DenseMoE(case.shape, seeded_experts(case.shape))
        expected_TH = dense(tokens[0], tokens[1], tokens[2] * active_TK)
        return float((layer(*tokens, active=active_TK) - expected_TH).abs().max())

    assert max(run_simulated(2, one_step)) <= 1e-5
