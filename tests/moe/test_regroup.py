"""A layer that moves to another group of ranks must be what a new layer there would be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.moe.cases import Case
from tests.moe.simulated import Exchange, SimulatedGroup, run_simulated
from worker_agent.moe import DenseMoE, ExpertParallelMoE, LayerOptions, seeded_experts
from worker_agent.moe.maps import most_replicas, replica_table
from worker_agent.moe.prepare import All2AllPreparation
from worker_agent.moe.rank_group import RankGroup

CASE = Case("all2allv", experts=6, slots=4, top_k=2, tokens=(5, 0, 3), biased=True, seed=4)


def layer_of(case: Case, group: RankGroup, **more: object) -> ExpertParallelMoE:
    return ExpertParallelMoE(
        case.shape,
        case.placement(),
        seeded_experts(case.shape, case.seed),
        biases=case.biases,
        ep_group=group,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("split", ["tables", "step"])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_layer_on_fewer_ranks_equals_a_new_one(split: str, quantized: bool):
    options = LayerOptions(split=split)
    smaller = dataclasses.replace(CASE, tokens=(5, 2), slots=3)
    exchange = Exchange(2)

    def steps(group: RankGroup) -> None:
        layer = layer_of(CASE, group, dealing_width=2, quantized=quantized, options=options)
        layer(*CASE.step(group.rank))
        if group.rank >= smaller.ranks:
            return
        other = SimulatedGroup(exchange, group.rank)
        experts = seeded_experts(CASE.shape, CASE.seed)
        layer.regroup(other, smaller.placement(), experts, biases=CASE.biases)
        new = layer_of(smaller, other, dealing_width=2, quantized=quantized, options=options)
        found, wanted = layer.state_dict(), new.state_dict()
        assert list(found) == list(wanted)
        maps = ("expert_map", "log2phy", "logical_to_physical_map", "logical_replica_count")
        for name, tensor in [*wanted.items(), *((name, getattr(new, name)) for name in maps)]:
            assert torch.equal(getattr(layer, name), tensor), name
        tokens = smaller.step(group.rank)
        out_TH = layer(*tokens)
        assert int(layer.load_counter) == 1
        expected_TH = DenseMoE(CASE.shape, experts, biases=CASE.biases)(*tokens)
        assert (out_TH - expected_TH).norm() <= (0.03 if quantized else 1e-6) * expected_TH.norm()

    run_simulated(CASE.ranks, steps)


def test_preparations_of_the_old_group_are_not_lost():
    alone = RankGroup(None)
    case = dataclasses.replace(CASE, experts=4, tokens=(3,))
    preparations = {"all2allv": All2AllPreparation(alone)}
    layer = layer_of(case, alone, options=LayerOptions(preparations=preparations))
    experts = seeded_experts(case.shape, case.seed)
    with pytest.raises(ValueError, match="layer 3: its preparations belong to the old group"):
        layer.regroup(alone, case.placement(), experts)
    layer.regroup(alone, case.placement(), experts, biases=case.biases, preparations=preparations)
    expected_TH = DenseMoE(case.shape, experts, biases=case.biases)(*case.step(0))
    torch.testing.assert_close(layer(*case.step(0)), expected_TH)


def test_a_placement_that_does_not_fit_leaves_the_layer_as_it_is():
    case = dataclasses.replace(CASE, experts=4, tokens=(3,))
    layer = layer_of(case, RankGroup(None))
    before = layer(*case.step(0))
    with pytest.raises(ValueError, match="phy2log must have the shape"):
        layer.regroup(None, np.zeros((2, 2), dtype=np.int32), seeded_experts(case.shape))
    assert torch.equal(layer(*case.step(0)), before)


def test_replicas_of_all_ranks_are_on_the_layer_and_follow_a_switch():
    def check(group: RankGroup) -> None:
        layer = layer_of(CASE, group)
        address = layer.logical_to_physical_map.data_ptr()
        for draw in range(3):
            placement_RS = CASE.placement(draw)
            if draw:
                layer.install_placement(placement_RS)
            table = replica_table(placement_RS, CASE.experts, most_replicas(CASE.experts, placement_RS))
            assert layer.logical_to_physical_map.tolist() == table.log2phys_EC.tolist()
            assert layer.logical_replica_count.tolist() == table.counts_E.tolist()
        assert layer.logical_to_physical_map.data_ptr() == address

    run_simulated(CASE.ranks, check)
