"""Tests that experts, activations and weight views match their definitions, and tests of split shared experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from eplb_lab.layer import Activation, DenseMoE, MoEShape, Router, SharedExperts, seeded_experts
from eplb_lab.layer.operators import reference
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.weights import ExpertWeights
from tests.moe.cases import Case, alone, shared_of, shared_weights, whole_of
from tests.moe.simulated import run_simulated


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_definition(activation: Activation, gate: float, up: float) -> float:
    """Compute the activation in plain Python."""
    if activation is Activation.SWIGLUOAI:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return gate * sigmoid(1.702 * gate) * (up + 1)
    if activation is Activation.SILU:
        return gate * sigmoid(gate) * up
    return gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))) * up


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_activation_matches_its_definition(activation: Activation, dtype: torch.dtype):
    values = [-20.0, -7.5, -1.25, -0.5, 0.0, 0.75, 3.0, 7.25, 20.0]
    pairs = [(gate, up) for gate in values for up in values]
    expected_N1 = torch.tensor([[by_definition(activation, *pair)] for pair in pairs], dtype=dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 2e-3}
    torch.testing.assert_close(activation(torch.tensor(pairs, dtype=dtype)), expected_N1, **tolerance)


DENSE = MoEShape(layer=1, experts=5, hidden=6, intermediate=4)


def test_each_token_is_the_weighted_sum_of_its_experts():
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(9, 6, generator=generator)
    weights_TK, ids_TK = Router(5, 2)(torch.randn(9, 5, generator=generator))
    experts = seeded_experts(DENSE)
    output_TH = DenseMoE(DENSE, experts)(hidden_TH, ids_TK, weights_TK)
    for token in range(9):
        expected_H = torch.zeros(6)
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            w13_IH, w2_HI = experts(expert)
            gate = w13_IH[:4] @ hidden_TH[token]
            up = w13_IH[4:] @ hidden_TH[token]
            expected_H += weight * (w2_HI @ (silu(gate) * up))
        torch.testing.assert_close(output_TH[token], expected_H)


def test_seeded_experts_depend_only_on_seed_layer_and_expert():
    first = seeded_experts(DENSE, 0)(3)
    for layer, seed, expert in ((1, 0, 3), (1, 0, 2), (1, 1, 3), (2, 0, 3)):
        drawn = seeded_experts(replace(DENSE, layer=layer), seed)(expert)
        same = [torch.equal(*both) for both in zip(first, drawn, strict=True)]
        assert same == [(layer, seed, expert) == (1, 0, 3)] * 2


CASE = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(5,), intermediate=10)


def part_of(weights: ExpertWeights, tp: RankGroup) -> ExpertWeights:
    """Return this rank's rows of the gate and up matrices and its columns of the down matrix, with the full w2 bias."""

    def gate_and_up(both_SI: torch.Tensor) -> torch.Tensor:
        return torch.cat([half.chunk(tp.size, dim=1)[tp.rank] for half in both_SI.chunk(2, dim=1)], dim=1)

    assert weights.w13_bias_SI is not None
    return ExpertWeights(
        gate_and_up(weights.w13_SIH),
        weights.w2_SHI.chunk(tp.size, dim=2)[tp.rank].contiguous(),
        w13_bias_SI=gate_and_up(weights.w13_bias_SI),
        w2_bias_SH=weights.w2_bias_SH,
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_tensor_parallel_ranks_add_up_to_the_whole(ranks: int, quantized: bool, gated: bool):
    generator = torch.Generator().manual_seed(2)
    weights, gate_H = shared_weights(CASE, gated)
    biases = torch.randn(1, 20, generator=generator), torch.randn(1, 8, generator=generator)
    weights = replace(weights, w13_bias_SI=biases[0], w2_bias_SH=biases[1])
    hidden_TH = torch.randn(7, 8, generator=generator)
    whole = SharedExperts(4, weights, reference, torch.float32, gate_H=gate_H)
    expected_TH = whole.part2(hidden_TH, whole.part1(hidden_TH))

    def own(tp: RankGroup) -> torch.Tensor:
        kind = "w8a8" if quantized else "none"
        part = part_of(weights, tp)
        shared = SharedExperts(4, part, reference, torch.float32, gate_H=gate_H, tp=tp, quantization=kind)
        return shared.start(hidden_TH)()

    outputs = run_simulated(ranks, own)
    assert all(torch.equal(outputs[0], other_TH) for other_TH in outputs)
    tolerance = 3e-2 if quantized else 1e-6
    assert float((outputs[0] - expected_TH).norm() / expected_TH.norm()) <= tolerance


def test_shared_experts_whose_parts_differ_from_the_whole_are_rejected():
    shared = shared_of(CASE)
    whole = whole_of(CASE)
    weights = shared_weights(CASE)[0]
    with pytest.raises(ValueError, match="layer 3: split shared experts differ from the unsplit ones"):
        SharedExperts(3, weights, reference, torch.float32, whole=lambda hidden_TH: whole(hidden_TH) + 1)
    SharedExperts(3, weights, reference, torch.float32, whole=whole)
    SharedExperts(3, weights, reference, torch.float32, whole=whole, quantization="w8a8")
    for wrong_whole, message in (
        (
            lambda hidden_TH: 2 * whole(hidden_TH),
            r"split shared experts differ from the unsplit ones by 0\.5",
        ),
        (lambda hidden_TH: whole(hidden_TH) * torch.nan, "differ from the unsplit ones by nan"),
        (lambda hidden_TH: whole(hidden_TH)[:, :4], r"return shape \[8, 4\] when run whole"),
    ):
        with pytest.raises(ValueError, match=f"layer 3: .*{message}"):
            shared.verify(wrong_whole)


def test_shared_expert_weights_of_the_wrong_shape_are_rejected():
    weights, _ = shared_weights(CASE)
    with pytest.raises(ValueError, match=r"layer 4: shared experts' w13 must have shape \[1, 2\*I, 8\]"):
        SharedExperts(4, ExpertWeights(weights.w13_SIH[:, :, :5], weights.w2_SHI), reference, torch.float32)
    with pytest.raises(ValueError, match=r"shared experts' gate must have shape \[8\], got \[5\]"):
        SharedExperts(4, weights, reference, torch.float32, gate_H=torch.zeros(5))


def test_the_state_of_a_layer_includes_its_shared_experts():
    shared = shared_of(CASE, gated=True)
    layer = alone(CASE, shared_experts=shared)
    names = {name.removeprefix("_shared_experts.") for name in layer.state_dict() if "shared" in name}
    assert names == {"w13_weight", "w2_weight", "gate_H"}
    assert shared in layer.modules()
    # Balancing moves only the layer's own experts, not the shared experts.
    assert [weight.shape[0] for weight in layer.expert_weights()] == [4] * 2
