"""Whatever a layer is made of, and whatever tokens are padding, it must equal its dense twin and count real heat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.moe.cases import MC2_VARIANTS, Case, alone, build, hand_counts
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.ranks import Ranks
from worker_agent.moe import DenseMoE, ExpertParallelMoE, LayerOptions, seeded_experts
from worker_agent.moe.composition import compose
from worker_agent.moe.dispatch import DISPATCHER_NAMES, SHARED_TOKEN_DISPATCHERS, MC2Variant
from worker_agent.moe.operators import reference
from worker_agent.moe.prepare import All2AllPreparation, SequenceParallelPreparation
from worker_agent.moe.rank_group import RankGroup


@st.composite
def composed(draw: st.DrawFn) -> tuple[Case, LayerOptions, float]:
    """A case, parts that fit it, and the share of its tokens that are real."""
    ranks, slots = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4))
    dispatcher = draw(st.sampled_from(DISPATCHER_NAMES))
    if dispatcher == "moge":
        experts, top_k = ranks * slots, ranks * draw(st.integers(1, slots))
    else:
        experts = draw(st.integers(slots, ranks * slots))
        top_k = draw(st.integers(1, min(experts, 4)))
    kind = draw(st.sampled_from(["grouped", "W8A8", "slotwise", "batched"]))
    case = Case(
        dispatcher,
        experts,
        slots,
        top_k,
        tuple(draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))),
        skew=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 1000)),
        quantized=kind == "W8A8",
    )
    options = LayerOptions(
        slotwise=kind == "slotwise",
        max_rank_tokens=6 if kind == "batched" else None,
        experts_weigh=dispatcher != "mc2" and draw(st.booleans()),
        weigh_on_input=top_k == 1 and kind != "W8A8" and draw(st.booleans()),
        quantize_before_gather=kind == "W8A8"
        and dispatcher in SHARED_TOKEN_DISPATCHERS
        and draw(st.booleans()),
        chunk_rows=draw(st.sampled_from([None, 1, 3])),
        mc2=draw(st.sampled_from(MC2_VARIANTS)),
    )
    return case, options, draw(st.sampled_from([0.0, 0.5, 1.0]))


def real_tokens(case: Case, rank: int, share: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + rank)
    return torch.rand(case.tokens[rank], generator=generator) < share


def masked_step(case: Case, options: LayerOptions, share: float) -> tuple[float, list[int], list[int]] | None:
    """Largest difference from the dense twin, whose outputs of padding are zeros, and the heat."""
    built = build(case, options=options)
    if built is None:
        return None
    layer, dense = built
    tokens = case.step(dist.get_rank())
    active_T = real_tokens(case, dist.get_rank(), share)
    output_TH = layer(*tokens, active=None if share == 1.0 else active_T)
    expected_TH = dense(*tokens).masked_fill(~active_T.unsqueeze(1), 0.0)
    assert output_TH.shape == expected_TH.shape
    difference = (output_TH - expected_TH).abs()
    loads = layer.moe_load[0].tolist(), layer.source_load[0].tolist()
    assert layer.total_load.tolist() == loads[0]
    return float(difference.max()) if difference.numel() else 0.0, *loads


# Not shrunk: that would start fresh ranks at each failing example.
@given(drawn=composed())
@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_all_parts_equal_the_dense_twin(eight_ranks: Ranks, drawn: tuple[Case, LayerOptions, float]):
    case, options, share = drawn
    results = eight_ranks.run(masked_step, case, options, share)[: case.ranks]
    active = [real_tokens(case, rank, share) for rank in range(case.ranks)]
    received_RS, source_RE = hand_counts(case, active=active)
    assert max(difference for difference, _, _ in results) <= 1e-5
    np.testing.assert_array_equal([received for _, received, _ in results], received_RS)
    np.testing.assert_array_equal([source for _, _, source in results], source_RE)


@pytest.mark.parametrize("variant", MC2_VARIANTS, ids=str)
def test_mc2_variants_on_eight_ranks(eight_ranks: Ranks, variant: MC2Variant):
    case = Case("mc2", 32, 5, 4, (9, 0, 3, 1, 16, 2, 0, 5), skew=0.1)
    results = eight_ranks.run(masked_step, case, LayerOptions(mc2=variant), 0.5)
    active = [real_tokens(case, rank, 0.5) for rank in range(8)]
    received_RS, source_RE = hand_counts(case, active=active)
    assert max(difference for difference, _, _ in results) <= 1e-5
    assert [received for _, received, _ in results] == received_RS.tolist()
    assert [source for _, _, source in results] == source_RE.tolist()


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (
            Case("mc2", 4, 4, 2, (3,)),
            LayerOptions(experts_weigh=True),
            "MC2Dispatcher weighs in its combine; GroupedExperts must not weigh",
        ),
        (
            Case("all2allv", 4, 4, 2, (3,), quantized=True),
            LayerOptions(slotwise=True),
            "SlotwiseExperts does not take int8 weights",
        ),
        (Case("all2allv", 4, 4, 2, (3,)), LayerOptions(chunk_rows=0), "takes no chunks of 0 rows"),
        (
            Case("all2allv", 4, 4, 2, (3,)),
            LayerOptions(max_rank_tokens=0),
            "room for one token per rank, got 0",
        ),
        (
            Case("allgather", 4, 4, 2, (3,)),
            LayerOptions(quantize_before_gather=True),
            "quantize_before_gather is for W8A8 layers; this one's weights are floating-point",
        ),
        (
            Case("mc2", 4, 4, 2, (3,), quantized=True),
            LayerOptions(quantize_before_gather=True),
            "quantize_before_gather needs a dispatcher that gathers by a default preparation, got mc2$",
        ),
        (
            Case("allgather", 4, 4, 2, (3,), quantized=True),
            LayerOptions(
                quantize_before_gather=True,
                preparations={"allgather": SequenceParallelPreparation(RankGroup(None))},
            ),
            "got allgather with preparations of their own",
        ),
        (
            Case("mc2", 4, 4, 2, (3,)),
            LayerOptions(preparations={"all2all": All2AllPreparation(RankGroup(None))}),
            "preparations are given for all2all, dispatchers are mc2",
        ),
    ],
)
def test_parts_that_do_not_fit_together(case: Case, options: LayerOptions, message: str):
    with pytest.raises(ValueError, match=message):
        alone(case, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            LayerOptions(max_rank_tokens=2),
            "layer 3: 3 tokens, padding among them, are more than the 2 of a rank's dispatch that the batched",
        ),
        (
            LayerOptions(weigh_on_input=True),
            "layer 3: weights can be applied to the input of one choice per token alone, got 2",
        ),
    ],
)
def test_tokens_that_do_not_fit_the_parts(options: LayerOptions, message: str):
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(3,))
    with pytest.raises(ValueError, match=message):
        alone(case, options)(*case.step(0))


def test_mc2_takes_no_expert_twice_and_no_more_tokens_than_its_operators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)
    case = Case("mc2", experts=4, slots=2, top_k=3, tokens=(3, 3))

    def one_step(group: RankGroup) -> None:
        layer = ExpertParallelMoE(
            case.shape,
            case.placement(),
            seeded_experts(case.shape),
            dispatcher=("mc2", "all2allv"),
            ep_group=group,
        )
        hidden_TH, ids_TK, weights_TK = case.step(group.rank)
        ids_TK[1] = torch.tensor([3, 0, 3])
        with pytest.raises(
            ValueError, match=r"layer 3: topk_ids must have distinct.*for MC2, got \[3, 0, 3\] at token 1"
        ):
            layer(hidden_TH, ids_TK, weights_TK)
        expected_TH = DenseMoE(case.shape, seeded_experts(case.shape))(hidden_TH, ids_TK, weights_TK)
        torch.testing.assert_close(layer(hidden_TH, ids_TK, weights_TK, dispatcher="all2allv"), expected_TH)

    run_simulated(2, one_step)
    npu: Any = SimpleNamespace(type="npu")
    options = LayerOptions(mc2=MC2Variant())
    path = compose(["mc2"], RankGroup(None), 4, reference, npu, quantized=False, options=options)["mc2"]
    path.check_room(3, 512)
    with pytest.raises(ValueError, match="layer 3: 513 tokens, padding among them, are more than the 512"):
        path.check_room(3, 513)


@pytest.mark.parametrize("experts_weigh", [False, True])
def test_a_grouped_token_with_more_than_its_share_on_a_rank_is_not_a_number(experts_weigh: bool):
    """Where ids are not checked, as on a device, an expert that has left its group must not go unnoticed."""
    case = Case("moge", experts=4, slots=2, top_k=2, tokens=(2, 2))

    def one_step(group: RankGroup) -> torch.Tensor:
        layer = ExpertParallelMoE(
            case.shape,
            np.arange(4, dtype=np.int32).reshape(2, 2),
            seeded_experts(case.shape),
            dispatcher="moge",
            ep_group=group,
            check_ids=False,
            options=LayerOptions(experts_weigh=experts_weigh),
        )
        layer.log2phy[1], layer.log2phy[2] = 2, 1
        ids_TK = torch.tensor([[0, 2], [0, 3]])
        out_TH: torch.Tensor = layer(torch.ones(2, 8), ids_TK, torch.ones(2, 2))
        return out_TH

    for out_TH in run_simulated(2, one_step):
        assert out_TH[0].isnan().all()
        assert not out_TH[1].isnan().any()


def test_weights_on_the_input_reach_tokens_that_were_quantized_before():
    case = Case("allgather", experts=4, slots=4, top_k=1, tokens=(6,), hidden=32, quantized=True)
    hidden_TH, ids_TK, _ = case.step(0)
    weights_T1 = torch.linspace(0.1, 2.0, 6).unsqueeze(1)
    options = LayerOptions(weigh_on_input=True, quantize_before_gather=True)
    found_TH = alone(case, options)(hidden_TH, ids_TK, weights_T1)
    wanted_TH = alone(case, LayerOptions(weigh_on_input=True))(hidden_TH, ids_TK, weights_T1)
    torch.testing.assert_close(found_TH, wanted_TH)


def test_weighing_on_the_input_changes_what_an_expert_sees():
    case = Case("all2allv", experts=4, slots=4, top_k=1, tokens=(3,))
    hidden_TH, ids_TK, _ = case.step(0)
    weights_TK = torch.full((3, 1), 0.5)
    dense = DenseMoE(case.shape, seeded_experts(case.shape))
    found_TH = alone(case, LayerOptions(weigh_on_input=True))(hidden_TH, ids_TK, weights_TK)
    torch.testing.assert_close(found_TH, dense(hidden_TH * 0.5, ids_TK, torch.ones(3, 1)))


def test_experts_are_of_one_kind():
    with pytest.raises(ValueError, match="either slotwise or batched"):
        LayerOptions(slotwise=True, max_rank_tokens=3)


def test_mc2_has_two_versions():
    with pytest.raises(ValueError, match="MC2 has versions 1 and 2, got 3"):
        MC2Variant(3)
