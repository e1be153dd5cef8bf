"""What every token chose in every layer is recorded by logical expert, in place."""

from __future__ import annotations

import pytest
import torch

from tests.moe.cases import Case
from tests.moe.simulated import run_simulated
from worker_agent.moe import ExpertParallelMoE, MicroBatch, MoEShape, RoutedExperts, seeded_experts
from worker_agent.moe.maps import initial_phy2log
from worker_agent.moe.rank_group import RankGroup

CASE = Case("all2allv", experts=6, slots=4, top_k=2, tokens=(5, 0, 3), skew=0.2)


def layers_of(group: RankGroup, routed: RoutedExperts, layers: int = 2) -> list[ExpertParallelMoE]:
    shapes = [MoEShape(layer, CASE.experts, CASE.hidden, CASE.intermediate) for layer in range(layers)]
    return [
        ExpertParallelMoE(
            shape, CASE.placement(shape.layer), seeded_experts(shape), ep_group=group, routed_experts=routed
        )
        for shape in shapes
    ]


def test_every_layer_records_its_tokens_choices():
    def steps(group: RankGroup) -> None:
        routed = RoutedExperts(tokens=10, layers=2, top_k=2)
        address = routed.ids_TLK.data_ptr()
        for step in range(2):
            tokens = [CASE.step(group.rank, step + 2 * layer) for layer in range(2)]
            count = tokens[0][0].shape[0]
            active_T = torch.arange(count) != 1
            for layer, each in zip(layers_of(group, routed), tokens, strict=True):
                layer(*each, active=active_T)
            wanted_TLK = torch.stack([ids_TK for _, ids_TK, _ in tokens], dim=1)
            wanted_TLK[~active_T] = -1
            assert torch.equal(routed.of_step(count), wanted_TLK)
        assert routed.ids_TLK.data_ptr() == address

    run_simulated(CASE.ranks, steps)


def test_micro_batches_follow_one_another():
    def step(group: RankGroup) -> None:
        routed = RoutedExperts(tokens=10, layers=1, top_k=2)
        (layer,) = layers_of(group, routed, layers=1)
        first, second = (CASE.step(group.rank, step) for step in range(2))
        layer.forward_two(MicroBatch(*first), MicroBatch(*second))
        count = 2 * first[0].shape[0]
        assert torch.equal(routed.of_step(count)[:, 0], torch.cat([first[1], second[1]]))

    run_simulated(CASE.ranks, step)


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (RoutedExperts(4, 1, 2), "layer 0: routed experts have room for 4 tokens of 2 choices, got 5 of 2"),
        (RoutedExperts(5, 1, 3), "layer 0: routed experts have room for 5 tokens of 3 choices, got 5 of 2"),
        (RoutedExperts(5, 0, 2), r"layer 0: routed experts are recorded of layers 0\.\.-1 alone"),
    ],
)
def test_choices_without_room_are_refused(routed: RoutedExperts, message: str):
    shape = MoEShape(0, CASE.experts, CASE.hidden, CASE.intermediate)
    layer = ExpertParallelMoE(
        shape, initial_phy2log(CASE.experts, 1), seeded_experts(shape), routed_experts=routed
    )
    with pytest.raises(ValueError, match=message):
        layer(*CASE.step(0))
    assert int(layer.load_counter) == 0
