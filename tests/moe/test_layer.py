"""Tests that the layer matches its dense twin for any placement and any tokens, and counts its heat."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eplb_lab.layer.dispatch import DISPATCHER_NAMES
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import Case, alone, build_on, ep_group, hand_counts, layer_on
from tests.moe.simulated import run_simulated
from tests.ranks import Ranks

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 8))
    slots = draw(st.integers(1, 4))
    dispatcher = draw(st.sampled_from(DISPATCHER_NAMES))
    if dispatcher == "moge":
        experts = ranks * slots
        top_k = ranks * draw(st.integers(1, slots))
    else:
        experts = draw(st.integers(slots, ranks * slots))
        top_k = draw(st.integers(1, min(experts, 4)))
    return Case(
        dispatcher=dispatcher,
        experts=experts,
        slots=slots,
        top_k=top_k,
        tokens=tuple(draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))),
        skew=draw(st.sampled_from([0.0, 0.3, 2.0])),
        seed=draw(st.integers(0, 1000)),
        quantized=draw(st.booleans()),
        entries=draw(st.sampled_from([1, 1, 2, 5])),
    )


def one_step(case: Case) -> tuple[float, list[int], list[int]] | None:
    """Return the largest difference from the dense twin, and the heat that this rank counted in the step."""
    group = ep_group(case.ranks)
    if dist.get_rank() >= case.ranks:
        return None
    layer, dense = build_on(case, RankGroup(group))
    tokens = case.step(dist.get_rank())
    output = layer(*tokens)
    expected = dense(*tokens)
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    difference = (output.float() - expected.float()).abs()
    return float(difference.max()) if difference.numel() else 0.0, *heat_rows(layer, 0)


def heat_rows(layer: torch.nn.Module, row: int) -> tuple[list[int], list[int]]:
    return layer.moe_load[row].tolist(), layer.source_load[row].tolist()


@given(case=cases())
@example(case=Case("moge", experts=4, slots=1, top_k=4, tokens=(0, 0, 0, 0)))
@example(case=Case("mc2", experts=3, slots=3, top_k=1, tokens=(0, 1)))
@example(case=Case("all2allv", experts=3, slots=2, top_k=2, tokens=(9, 0, 7), skew=0.1, entries=4))
@example(case=Case("allgather", experts=3, slots=2, top_k=2, tokens=(9, 0, 7), skew=0.1, entries=4))
@example(case=Case("mc2", 32, 5, 4, (9, 0, 3, 1, 16, 2, 0, 5), skew=0.1, dtype=torch.bfloat16))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_layer_equals_its_dense_twin_and_counts_exact_heat(eight_ranks: Ranks, case: Case):
    results = eight_ranks.run(one_step, case)[: case.ranks]
    received_RS, source_RE = hand_counts(case)
    assert max(difference for difference, _, _ in results) <= TOLERANCE[case.dtype]
    np.testing.assert_array_equal([received for _, received, _ in results], received_RS)
    np.testing.assert_array_equal([source for _, _, source in results], source_RE)


def test_the_heat_ring_wraps_around():
    case = Case("all2allv", experts=4, slots=3, top_k=2, tokens=(5, 3), skew=0.2)
    rows = 3
    steps = 7

    def steps_over_a_ring(group: RankGroup) -> list[tuple[list[int], list[int]]]:
        layer = layer_on(case, group, heat_rows=rows)
        for step in range(steps):
            layer(*case.step(group.rank, step))
        assert int(layer.load_counter) == steps
        return [heat_rows(layer, row) for row in range(rows)]

    for rank, ring in enumerate(run_simulated(2, steps_over_a_ring)):
        for step in range(steps - rows, steps):
            received_RS, source_RE = hand_counts(case, step)
            assert ring[step % rows] == (received_RS[rank].tolist(), source_RE[rank].tolist())


def switch_placement(case: Case, group: RankGroup) -> tuple[float, list[int]]:
    """Check outputs before and after a new placement is written in place, and return the heat counted under it."""
    layer = layer_on(case, group)
    rank = group.rank
    tokens = case.step(rank)
    before = layer(*tokens)
    tensors = [*layer.expert_weights(), layer.expert_map, layer.log2phy, layer.moe_load, layer.load_counter]
    addresses = [tensor.data_ptr() for tensor in tensors]

    placed_S = torch.tensor(case.placement(draw=1)[rank]).long()
    for weight, weight_of_expert in zip(layer.expert_weights(), alone(case).expert_weights(), strict=True):
        weight.copy_(weight_of_expert[placed_S])
    layer.expert_map.fill_(-1)
    layer.expert_map[placed_S] = torch.arange(case.slots, dtype=torch.int32)
    layer.log2phy.copy_(torch.tensor(case.tables(draw=1)[rank]))

    after = layer(*tokens)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    return float((after - before).abs().max()), layer.moe_load[1].tolist()


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
@pytest.mark.parametrize(("quantized", "entries"), [(False, 1), (True, 1), (False, 4)])
def test_a_placement_written_in_place_changes_no_output(dispatcher: str, quantized: bool, entries: int):
    experts, top_k = (12, 4) if dispatcher == "moge" else (6, 3)
    case = Case(
        dispatcher, experts, 3, top_k, tokens=(4, 7, 1, 2), skew=0.3, quantized=quantized, entries=entries
    )
    results = run_simulated(case.ranks, lambda group: switch_placement(case, group))
    assert max(difference for difference, _ in results) <= 1e-5
    assert [received for _, received in results] == hand_counts(case, draw=1)[0].tolist()
