"""Shared experts in two parts must equal the whole, or be refused at load time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.moe.cases import Case, build, ep_group
from tests.moe.simulated import run_simulated
from tests.ranks import Ranks
from worker_agent.moe import ExpertParallelMoE, MoEShape, SharedExperts, seeded_experts
from worker_agent.moe.dispatch import DISPATCHER_NAMES
from worker_agent.moe.maps import initial_phy2log
from worker_agent.moe.operators import reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shared_experts import dense_shared_experts
from worker_agent.moe.weights import ExpertWeights, build_weights

SHAPE = MoEShape(layer=4, experts=1, hidden=8, intermediate=10)


def float_weights(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    return build_weights(SHAPE, seeded_experts(SHAPE, seed=7), [0], dtype, "cpu")


def parts_and_whole(gated: bool, quantized: bool, dtype: torch.dtype = torch.float32):
    weights = float_weights(dtype)
    gate_H = torch.randn(8, generator=torch.Generator().manual_seed(1)).to(dtype) if gated else None
    whole = dense_shared_experts(weights.w13_SIH[0], weights.w2_SHI[0], gate_H)
    if quantized:
        weights = weights.quantize(reference)
    return SharedExperts(4, weights, reference, dtype, gate_H, whole=whole), whole


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_equal_the_whole(gated: bool, quantized: bool, dtype: torch.dtype):
    shared, whole = parts_and_whole(gated, quantized, dtype)
    shared.verify(whole, tolerance=1e-6 if not quantized and dtype is torch.float32 else 3e-2)
    hidden_TH = torch.randn(5, 8).to(dtype)
    run = shared.beside(hidden_TH)
    run.during_dispatch()
    assert torch.equal(run.during_combine(), shared.part2(hidden_TH, shared.part1(hidden_TH)))


def part_of(weights: ExpertWeights, tp: RankGroup) -> ExpertWeights:
    """This rank's rows of gate and up, and its columns of down; all of w2's bias."""
    inner = weights.w2_SHI.shape[2]
    own = slice(tp.rank * inner // tp.size, (tp.rank + 1) * inner // tp.size)

    def gate_and_up(both_SI: torch.Tensor) -> torch.Tensor:
        return torch.cat([half[:, own] for half in both_SI.chunk(2, dim=1)], dim=1).contiguous()

    assert weights.w13_bias_SI is not None
    return ExpertWeights(
        gate_and_up(weights.w13_SIH),
        weights.w2_SHI[:, :, own].contiguous(),
        w13_bias_SI=gate_and_up(weights.w13_bias_SI),
        w2_bias_SH=weights.w2_bias_SH,
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_tensor_parallel_ranks_sum_up_to_the_whole(ranks: int, quantized: bool, gated: bool):
    generator = torch.Generator().manual_seed(2)
    weights = replace(
        float_weights(),
        w13_bias_SI=torch.randn(1, 20, generator=generator),
        w2_bias_SH=torch.randn(1, 8, generator=generator),
    )
    gate_H = torch.randn(8, generator=generator) if gated else None
    hidden_TH = torch.randn(7, 8, generator=generator)
    whole = SharedExperts(4, weights, reference, torch.float32, gate_H)
    expected_TH = whole.part2(hidden_TH, whole.part1(hidden_TH))

    def own(tp: RankGroup) -> torch.Tensor:
        part = part_of(weights, tp)
        part = part.quantize(reference) if quantized else part
        run = SharedExperts(4, part, reference, torch.float32, gate_H, tp=tp).beside(hidden_TH)
        run.during_dispatch()
        return run.during_combine()

    found = run_simulated(ranks, own)
    assert all(torch.equal(found[0], other_TH) for other_TH in found)
    tolerance = 3e-2 if quantized else 1e-6
    assert float((found[0] - expected_TH).norm() / expected_TH.norm()) <= tolerance


def test_a_whole_that_does_more_than_the_parts_is_refused_where_the_parts_are_made_and_later():
    shared, whole = parts_and_whole(gated=False, quantized=False)
    with pytest.raises(ValueError, match="layer 4: shared experts in two parts differ from the whole"):
        SharedExperts(
            4, float_weights(), reference, torch.float32, whole=lambda hidden_TH: whole(hidden_TH) + 1
        )
    with pytest.raises(
        ValueError, match=r"layer 4: shared experts in two parts differ from the whole by 0\.5"
    ):
        shared.verify(lambda hidden_TH: 2 * whole(hidden_TH))
    with pytest.raises(ValueError, match="differ from the whole by nan"):
        shared.verify(lambda hidden_TH: whole(hidden_TH) * torch.nan)
    with pytest.raises(ValueError, match=r"layer 4: shared experts give the shape \[8, 4\] as a whole"):
        shared.verify(lambda hidden_TH: whole(hidden_TH)[:, :4])


def test_weights_that_do_not_fit():
    weights = float_weights()
    with pytest.raises(ValueError, match=r"layer 4: shared experts' w13 must have the shape \[1, 2\*I, 8\]"):
        SharedExperts(4, ExpertWeights(weights.w13_SIH[:, :, :5], weights.w2_SHI), reference, torch.float32)
    with pytest.raises(ValueError, match=r"shared experts' gate must have the shape \[8\], got \[5\]"):
        SharedExperts(4, weights, reference, torch.float32, torch.zeros(5))


def with_shared_experts(case: Case) -> float | None:
    built = build(case)
    if built is None:
        return None
    rank = dist.get_rank()
    shared, whole = parts_and_whole(gated=True, quantized=False)
    layer = ExpertParallelMoE(
        case.shape,
        case.placement(),
        seeded_experts(case.shape, case.seed),
        log2phy_E=case.tables()[rank],
        dispatcher=case.dispatcher,
        ep_group=ep_group(case.ranks),
        shared_experts=shared,
    )
    tokens = case.step(rank)
    difference = (layer(*tokens) - built[1](*tokens) - whole(tokens[0])).abs()
    return float(difference.max()) if difference.numel() else 0.0


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
def test_their_outputs_are_added_once(eight_ranks: Ranks, dispatcher: str):
    experts, top_k = (8, 4) if dispatcher == "moge" else (6, 2)
    case = Case(dispatcher, experts, 2, top_k, tokens=(3, 0, 1, 6), skew=0.2)
    assert max(eight_ranks.run(with_shared_experts, case)[:4]) <= 1e-5


def test_a_layers_state_has_its_shared_experts():
    shared, _ = parts_and_whole(gated=True, quantized=True)
    shape = MoEShape(layer=4, experts=2, hidden=8, intermediate=6)
    layer = ExpertParallelMoE(
        shape, initial_phy2log(2, 1), seeded_experts(shape), quantized=True, shared_experts=shared
    )
    names = {name.removeprefix("_shared_experts.") for name in layer.state_dict() if "shared" in name}
    assert names == {"w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "gate_H"}
    assert shared in layer.modules()
    # What balancing moves is the layer's own.
    assert [view.shape[0] for view in layer.get_expert_weights()] == [2] * 4
