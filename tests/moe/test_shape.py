"""Tests that input is validated before any collective, with errors that name the layer, tensor and requirement."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_core.placement import PlacementError
from eplb_lab.layer import ExpertParallelMoE, MoEShape, seeded_experts
from eplb_lab.layer.dispatch import DISPATCHER_NAMES
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.state import check_grouped
from tests.moe.cases import Case, build_on, in_order, layer_on
from tests.moe.simulated import run_simulated
from tests.ranks import Ranks
from worker_agent.live_layer import LiveLayer

SHAPE = MoEShape(layer=5, experts=4, hidden=8, intermediate=6)
ALONE_RS = in_order(4)


@pytest.fixture
def layer() -> ExpertParallelMoE:
    return ExpertParallelMoE(SHAPE, ALONE_RS, seeded_experts(SHAPE))


def good_input() -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.randn(3, 8),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [3, 0]]),
        "topk_weights": torch.full((3, 2), 0.5),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden", torch.randn(3, 7), r"layer 5: hidden must have shape \[T, 8\], got \[3, 7\]"),
        ("hidden", torch.randn(8), r"shape \[T, 8\], got \[8\]"),
        ("hidden", torch.randn(3, 8).double(), "hidden must have the layer's dtype torch.float32"),
        ("hidden", torch.empty(3, 8, device="meta"), "hidden must have the layer's device cpu, got meta"),
        ("topk_ids", torch.zeros(2, 2).long(), r"topk_ids must have shape \[3, K\] with K >= 1"),
        ("topk_ids", torch.zeros(3, 0).long(), r"shape \[3, K\] with K >= 1"),
        ("topk_ids", torch.zeros(3, 2), "topk_ids must have dtype int32 or int64, got torch.float32"),
        ("topk_ids", torch.tensor([[0, 1], [2, 4], [0, 1]]), r"ids 0\.\.3, got 4 at token 1, choice 1"),
        ("topk_ids", torch.tensor([[0, 1], [2, 3], [-1, 1]]), r"ids 0\.\.3, got -1 at token 2, choice 0"),
        ("topk_weights", torch.ones(3, 1), r"topk_weights must have shape \[3, 2\], got \[3, 1\]"),
        ("topk_weights", torch.ones(3, 2).int(), "topk_weights must have a floating-point dtype"),
        ("active", torch.ones(4).bool(), r"active must have shape \[3\] or \[3, 2\], got \[4\]"),
        ("active", torch.ones(3), "active must have dtype torch.bool, got torch.float32"),
        ("active", torch.ones(3, device="meta").bool(), "active must have the layer's device cpu, got meta"),
    ],
)
def test_a_call_with_invalid_tensors_is_rejected(
    layer: ExpertParallelMoE, name: str, value: torch.Tensor, message: str
):
    hidden, ids, weights, *active = (good_input() | {name: value}).values()
    with pytest.raises(ValueError, match=message):
        layer(hidden, ids, weights, active=active[0] if active else None)
    assert int(layer.load_counter) == 0
    layer(*good_input().values())


def test_ids_are_not_read_if_their_check_is_disabled():
    layer = ExpertParallelMoE(SHAPE, ALONE_RS, seeded_experts(SHAPE), check_ids=False)
    with pytest.raises(IndexError):
        layer(*(good_input() | {"topk_ids": torch.full((3, 2), 9)}).values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"phy2log_RS": ALONE_RS.reshape(2, 2)}, r"layer 5: phy2log must have shape \[1 ranks, slots\]"),
        ({"phy2log_RS": ALONE_RS[0]}, r"phy2log must have shape \[1 ranks, slots\], got \[4\]"),
        ({"phy2log_RS": np.zeros((1, 4), dtype=np.int32)}, "layer 5: expert 1 has no slot"),
        ({"log2phy_E": np.zeros(3, dtype=np.int32)}, r"log2phy must have shape \[4\], got \[3\]"),
        ({"log2phy_E": np.zeros(4, dtype=np.int32)}, "layer 5: log2phy: expert 1 points to slot 0"),
        ({"dispatcher": "pigeon"}, "unknown dispatcher 'pigeon'; use one of all2allv, allgather, mc2, moge"),
        ({"phy2log_RS": ALONE_RS[:, :3]}, "1 ranks x 3 slots = 3 slots cannot hold 4 experts"),
        ({"heat_rows": 0}, "heat_rows must be at least 1, got 0"),
        ({"experts": lambda _: (torch.zeros(12, 8), torch.zeros(6, 8))}, "w2 of expert 0 must have sh"),
    ],
)
def test_a_layer_with_invalid_arguments_is_rejected(changed: dict[str, object], message: str):
    arguments = {"phy2log_RS": ALONE_RS, "experts": seeded_experts(SHAPE)} | changed
    with pytest.raises(ValueError, match=message):
        ExpertParallelMoE(SHAPE, **arguments)


def test_grouped_experts_stay_on_their_rank():
    check_grouped(5, np.array([[1, 0], [2, 3]], dtype=np.int32))
    with pytest.raises(
        PlacementError, match=r"layer 5: grouped .*rank 0 must hold experts 0\.\.1, got \[0, 2"
    ):
        check_grouped(5, np.array([[0, 2], [1, 3]], dtype=np.int32))


def test_dimensions_that_are_not_positive_are_rejected():
    with pytest.raises(ValueError, match="layer 2: experts, hidden and intermediate must be positive"):
        MoEShape(2, experts=4, hidden=0, intermediate=6)


def test_the_layer_has_the_attributes_of_a_live_layer(layer: ExpertParallelMoE):
    live: LiveLayer = layer
    assert live.expert_map.dtype == live.log2phy.dtype == live.moe_load.dtype == torch.int32
    assert live.source_load is not None
    assert live.source_load.shape == (64, 4)
    assert live.moe_load.shape == (64, 4)
    assert live.load_counter.dtype == torch.int64
    assert live.load_counter.ndim == 0
    assert all(weight.is_contiguous() and weight.shape[0] == 4 for weight in live.expert_weights())
    assert "layer 5, rank 0 of 1, 4 of 4 experts by slot: 0->0, 1->1, 2->2, 3->3" in repr(layer)


@pytest.mark.parametrize("dispatcher", DISPATCHER_NAMES)
def test_a_step_succeeds_after_all_ranks_have_rejected_invalid_input(dispatcher: str):
    case = Case(dispatcher, experts=4, slots=2, top_k=2, tokens=(3, 4))

    def reject_then_serve(group: RankGroup) -> None:
        layer, dense = build_on(case, group)
        hidden, ids, weights = case.step(group.rank)
        for wrong in (ids + case.experts, ids[: group.rank]):
            with pytest.raises(ValueError, match="layer 3: topk_ids must have"):
                layer(hidden, wrong, weights)
        torch.testing.assert_close(layer(hidden, ids, weights), dense(hidden, ids, weights))

    run_simulated(2, reject_then_serve)


def reject_on_rank_0(case: Case) -> None:
    """Pass invalid input to rank 0 only.

    The other ranks enter the step's exchange, in a group with a timeout of one second.
    """
    group = dist.new_group(list(range(case.ranks)), timeout=timedelta(seconds=1))
    rank = dist.get_rank()
    if rank >= case.ranks:
        return
    layer = layer_on(case, RankGroup(group))
    hidden, ids, weights = case.step(rank)
    if rank == 0:
        with pytest.raises(ValueError, match="layer 3: topk_ids must have expert ids"):
            layer(hidden, ids + case.experts, weights)
    else:
        with pytest.raises(RuntimeError, match="imed out"):
            layer(hidden, ids, weights)


@pytest.mark.parametrize("dispatcher", ["all2allv", "mc2"])
def test_other_ranks_time_out_if_one_rank_rejects_its_input(eight_ranks: Ranks, dispatcher: str):
    case = Case(dispatcher, experts=4, slots=2, top_k=2, tokens=(3, 4))
    eight_ranks.run(reject_on_rank_0, case)


def test_all_gather_raises_on_every_rank_if_token_sizes_differ():
    case = Case("allgather", experts=4, slots=2, top_k=2, tokens=(3, 4))

    def unequal_widths(group: RankGroup) -> str:
        hidden, ids, weights = case.step(group.rank)
        choices = 1 + group.rank
        with pytest.raises(ValueError, match="ranks disagree about bytes per token") as refused:
            build_on(case, group)[0](hidden, ids[:, :choices], weights[:, :choices])
        return str(refused.value)

    assert len(set(run_simulated(2, unequal_widths))) == 1


def test_grouped_experts_require_the_same_number_of_choices_on_each_rank():
    case = Case("moge", experts=4, slots=2, top_k=2, tokens=(3, 4))

    def choose_unequally(group: RankGroup) -> None:
        layer, dense = build_on(case, group)
        hidden, ids, weights = case.step(group.rank)
        with pytest.raises(
            ValueError, match="the number of choices in topk_ids must be a multiple of 2, got 1"
        ):
            layer(hidden, ids[:, :1], weights[:, :1])
        with pytest.raises(ValueError, match="token 0 must choose at most 1 experts on each of 2 ranks"):
            layer(hidden, torch.zeros_like(ids), weights)
        torch.testing.assert_close(layer(hidden, ids, weights), dense(hidden, ids, weights))

    run_simulated(2, choose_unequally)
