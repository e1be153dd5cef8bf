"""Tests that parts and tokens that do not match are rejected, and tests of masks, input weighting and variants."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_lab.layer import LayerOptions
from eplb_lab.layer.compose import LayerGroups, LayerPath
from eplb_lab.layer.dispatch import MC2Limits, MC2Variant
from eplb_lab.layer.operators import reference
from eplb_lab.layer.quantization import Unquantized
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import Case, alone, layer_on
from tests.moe.simulated import Exchange, SimulatedGroup, run_simulated

TWICE = {"dp_groups": [RankGroup(None), SimulatedGroup(Exchange(2), 0)], "tp_group": RankGroup(None)}
EARLY = {"quantize_before_gather": True}


@pytest.mark.parametrize(
    ("dispatcher", "quantized", "options", "message"),
    [
        ("all2allv", True, {"max_rank_tokens": 3}, "requires floating-point weights"),
        ("all2allv", False, {"max_rank_tokens": 0}, "max_rank_tokens must be at least 1, got 0"),
        ("allgather", False, EARLY, "this layer's weights are floating-point"),
        ("mc2", True, EARLY, "requires a dispatcher that gathers, got mc2$"),
        ("moge", False, TWICE, r"layer 3: moge gathers the tokens of 1 ranks, but .* 1 x 2 x 1 ranks;"),
        ([], False, {}, "a layer needs at least one dispatcher"),
        ("all2allv", False, {"split": "steps"}, "split must be 'tables' or 'step', got 'steps'"),
    ],
)
def test_incompatible_options_are_rejected(
    dispatcher: Any, quantized: bool, options: dict[str, Any], message: str
):
    case = Case("mc2", 4, 4, 2, (3,), quantized=quantized)
    with pytest.raises(ValueError, match=message):
        alone(case, LayerOptions(**options), dispatcher=dispatcher)


def test_only_a_single_choice_can_be_weighted_on_the_input():
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(3,))
    with pytest.raises(ValueError, match=r"layer 3: weigh_on_input requires one choice per token, got 2"):
        alone(case, LayerOptions(weigh_on_input=True))(*case.step(0))


def test_mc2_rejects_an_expert_chosen_twice():
    case = Case("mc2", experts=4, slots=4, top_k=3, tokens=(3,))
    layer = alone(case, dispatcher=("mc2", "all2allv"))
    hidden_TH, ids_TK, weights_TK = case.step(0)
    ids_TK[1] = torch.tensor([3, 0, 3])
    with pytest.raises(ValueError, match=r"layer 3: MC2 requires distinct.* got \[3, 0, 3\] at token 1"):
        layer(hidden_TH, ids_TK, weights_TK)
    expected_TH = case.dense()(hidden_TH, ids_TK, weights_TK)
    torch.testing.assert_close(layer(hidden_TH, ids_TK, weights_TK, dispatcher="all2allv"), expected_TH)


A3, A2, TWO_LEVELS = (
    MC2Variant(a3, hierarchical, buffer_megabytes=200)
    for a3, hierarchical in ((True, False), (False, False), (False, True))
)


def limits(variant: MC2Variant, ranks: int = 32, slots: int = 9, hidden: int = 7168) -> MC2Limits:
    return MC2Limits(3, hidden, ranks, slots, variant)


@pytest.mark.parametrize(
    ("variant", "sizes", "message"),
    [
        (A3, {"ranks": 1}, "2 to 768 ranks on A3, got 1$"),
        (A3, {"ranks": 800, "slots": 1}, "2 to 768 ranks on A3, got 800$"),
        (A3, {"hidden": 896}, "a hidden size of 1024 to 8192 on A3, got 896"),
        (A3, {"slots": 33}, "at most 1024 physical experts, got 1056"),
        (A2, {"ranks": 8}, "16, 32, 64, 128, 256 ranks on A2, got 8$"),
        (A2, {"slots": 25}, "at most 24 experts per rank on A2, got 25"),
        (A2, {"hidden": 7200}, "a hidden size of 1 to 7168 on A2, got 7200"),
        (TWO_LEVELS, {"ranks": 128, "slots": 3}, "16, 32, 64 ranks on A2, got 128$"),
        (TWO_LEVELS, {"hidden": 10272}, "of 1 to 10240 on A2, got 10272"),
    ],
)
def test_group_sizes_beyond_the_documented_mc2_limits_are_rejected(
    variant: MC2Variant, sizes: dict[str, int], message: str
):
    with pytest.raises(ValueError, match=f"layer 3: MC2 needs .*{message}"):
        limits(variant, **sizes)


@pytest.mark.parametrize(
    ("variant", "tokens", "choices", "message"),
    [
        (A3, 513, 8, "supports at most 512 tokens per rank, including padding, got 513"),
        (A2, 257, 8, "supports at most 256 tokens per rank, including padding, got 257"),
        (A3, 1, 17, "supports at most 16 choices per token, got 17"),
        (
            A3,
            32,
            8,
            "needs buffers of 269 MB for 32 tokens on each of 32 ranks, but has 200 MB; set HCCL_BUFFS",
        ),
        (A3, 512, 8, "needs buffers of 4302 MB"),
        # Computed by hand: 2 * (32 * 32 * 8 * 14336 bytes + 2 MB), and 288 * 32 * (14336 + 16 * 8) bytes + 104 MB.
        (A2, 32, 8, "needs buffers of 228 MB"),
        (TWO_LEVELS, 32, 8, "needs buffers of 232 MB"),
    ],
)
def test_steps_beyond_the_documented_mc2_limits_are_rejected(
    variant: MC2Variant, tokens: int, choices: int, message: str
):
    with pytest.raises(ValueError, match=f"layer 3: MC2 {message}"):
        limits(variant).check_step(tokens, choices)
    limits(replace(variant, buffer_megabytes=4302)).check_step(min(tokens, 256), min(choices, 16))


def test_a_layer_enforces_the_limits_of_mc2_and_requires_a_separate_group():
    case = Case("mc2", experts=4, slots=2, top_k=3, tokens=(3, 3), hidden=1024)
    options = LayerOptions(mc2=replace(A3, buffer_megabytes=1))

    def one_step(group: SimulatedGroup) -> None:
        with pytest.raises(ValueError, match="layer 3: MC2 needs a process group that nothing else uses"):
            layer_on(case, group, options=options)
        with pytest.raises(
            ValueError, match=r"layer 3: mc2_group must have the same ranks.*rank 0 of 1 in mc2_group"
        ):
            layer_on(case, group, options=options, mc2_group=RankGroup(None))
        layer = layer_on(case, group, options=options, mc2_group=group.twin("mc2"))
        torch.testing.assert_close(layer(*case.step(group.rank)), case.dense()(*case.step(group.rank)))
        with pytest.raises(ValueError, match=r"layer 3: MC2 needs buffers of \d MB for 128 tokens"):
            layer(*case.step(group.rank), length=128)

    run_simulated(2, one_step)


def test_the_mc2_buffer_size_on_an_npu_is_read_from_hccl_buffsize(monkeypatch: pytest.MonkeyPatch):
    npu: Any = SimpleNamespace(type="npu")
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert MC2Variant().on(npu).buffer_megabytes == 200
    monkeypatch.setenv("HCCL_BUFFSIZE", "512")
    assert MC2Variant().on(npu).buffer_megabytes == 512
    assert MC2Variant(buffer_megabytes=7).on(npu).buffer_megabytes == 7
    assert MC2Variant().on(torch.device("cpu")).buffer_megabytes is None
    monkeypatch.setenv("HCCL_BUFFSIZE", "a lot")
    with pytest.raises(ValueError, match="HCCL_BUFFSIZE must be a whole number of MB, got 'a lot'"):
        MC2Variant().on(npu)
    shape = Case("mc2", 4, 2, 2, (1,)).shape
    groups = LayerGroups.of(None, None)
    monkeypatch.delenv("HCCL_BUFFSIZE")
    with pytest.raises(ValueError, match="layer 3: MC2 needs a process group that nothing else uses"):
        LayerPath.of(
            "mc2", shape, groups, 4, reference, npu, LayerOptions(mc2=MC2Variant()), Unquantized(reference)
        )


def test_a_grouped_token_with_too_many_choices_on_a_rank_becomes_nan():
    """Ids are not checked on accelerators, so NaN must reveal an expert outside its group."""
    case = Case("moge", experts=4, slots=2, top_k=2, tokens=(2, 2))

    def one_step(group: RankGroup) -> torch.Tensor:
        in_order_RS = np.arange(4, dtype=np.int32).reshape(2, 2)
        layer = layer_on(case, group, phy2log_RS=in_order_RS, log2phy_E=None, check_ids=False)
        layer.log2phy[1] = 2
        layer.log2phy[2] = 1
        ids_TK = torch.tensor([[0, 2], [0, 3]])
        out_TH: torch.Tensor = layer(torch.ones(2, 8), ids_TK, torch.ones(2, 2))
        return out_TH

    for out_TH in run_simulated(2, one_step):
        assert out_TH[0].isnan().all()
        assert not out_TH[1].isnan().any()
