"""The dense twin must be a plain sum over each token's choices, and seeded experts the same wherever they are built."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from worker_agent.moe import DenseMoE, MoEShape, Router, seeded_experts

SHAPE = MoEShape(layer=1, experts=5, hidden=6, intermediate=4)


def test_each_token_is_the_weighted_sum_of_its_experts():
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(9, 6, generator=generator)
    weights_TK, ids_TK = Router(5, 2)(torch.randn(9, 5, generator=generator))
    experts = seeded_experts(SHAPE)
    output_TH = DenseMoE(SHAPE, experts)(hidden_TH, ids_TK, weights_TK)
    for token in range(9):
        expected_H = torch.zeros(6)
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            w13_IH, w2_HI = experts(expert)
            gate, up = w13_IH[:4] @ hidden_TH[token], w13_IH[4:] @ hidden_TH[token]
            expected_H += weight * (w2_HI @ (silu(gate) * up))
        torch.testing.assert_close(output_TH[token], expected_H)


def test_seeded_experts_differ_by_seed_layer_and_expert_only():
    other_layer = MoEShape(layer=2, experts=5, hidden=6, intermediate=4)
    drawn = [
        seeded_experts(SHAPE, 0)(3),
        seeded_experts(SHAPE, 0)(2),
        seeded_experts(SHAPE, 1)(3),
        seeded_experts(other_layer, 0)(3),
    ]
    again = seeded_experts(SHAPE, 0)(3)
    same = [torch.equal(w13, again[0]) and torch.equal(w2, again[1]) for w13, w2 in drawn]
    assert same == [True, False, False, False]
