"""Tests that the right weights of vLLM-Ascend's layers move, and that layers with immovable weights are rejected."""

import sys
import types
from contextlib import nullcontext

import pytest
import torch

from tests.adapters.sglang_fakes import put_modules
from tests.engines.ascend_layers import EXPERTS, LISTS, SCALES, SLOTS, per_expert, weighted
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import HeatRings
from worker_agent.adapters.vllm_ascend import weights
from worker_agent.adapters.vllm_ascend.refusals import refuse_lists, refuse_misread_lists
from worker_agent.adapters.vllm_ascend.weights import (
    AscendLayer,
    check_same_formats,
    expert_weights,
)
from worker_agent.device import format_of


def in_lists():
    """Return a quantised layer that has a separate tensor for each expert."""
    return weighted("W8A8", **{name: [torch.zeros(2) for _ in range(SLOTS)] for name in LISTS})


def test_the_moved_weights_are_those_that_the_kernels_read():
    plain = weighted("W8A8", w13_weight=per_expert(2, 3), w2_weight=per_expert(3, 2))
    moved_weights = expert_weights(plain, quantised=False)
    assert [weight.data_ptr() for weight in moved_weights] == [
        plain.w13_weight.data_ptr(),
        plain.w2_weight.data_ptr(),
    ]
    layer = in_lists()
    moved_weights = expert_weights(layer, quantised=True, move_quantised=True)
    assert all(
        kind[slot] is getattr(layer, name)[slot]
        for kind, name in zip(moved_weights, LISTS, strict=True)
        for slot in range(SLOTS)
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (weighted("W4A8"), "W4A8 quantisation"),
        (weighted("W8A8", w13_weight_list=[]), "without w2_weight_list"),
        (
            weighted("NONE", w13_weight=per_expert(1), w2_weight=per_expert(1), w13_bias=per_expert(1)),
            "w13_bias",
        ),
    ],
)
def test_experts_that_would_not_move_completely_are_refused(layer, reason):
    with pytest.raises(UnsupportedEngineError, match=reason):
        expert_weights(layer, quantised=True, move_quantised=True)


def test_quantised_experts_are_moved_only_on_request():
    with pytest.raises(UnsupportedEngineError, match="No test on a device"):
        expert_weights(weighted("W8A8", w13_weight_list=[]), quantised=True)


ND = 2
NZ = 29


def in_formats(monkeypatch, *formats):
    """Make the NPU report these formats for its tensors, in turn."""
    reported_formats = iter(formats)
    monkeypatch.setattr(weights, "format_of", lambda _: next(reported_formats))


def test_a_single_nz_tensor_for_all_experts_is_refused(monkeypatch):
    host = weighted("NONE", w13_weight=per_expert(2, 3), w2_weight=per_expert(3, 2))
    in_formats(monkeypatch, ND, NZ)
    with pytest.raises(
        UnsupportedEngineError, match=r"w2_weight tensor .* all experts .* format 29 .*weight_nz_mode"
    ):
        expert_weights(host, quantised=False)
    in_formats(monkeypatch, ND, ND)
    assert len(expert_weights(host, quantised=False)) == 2


def test_separate_expert_tensors_may_be_nz_if_all_tensors_of_their_kind_are_nz(monkeypatch):
    host = in_lists()
    in_formats(monkeypatch, *[NZ] * 2 * SLOTS, *[ND] * 2 * SLOTS)
    assert len(expert_weights(host, quantised=True, move_quantised=True)) == 4
    in_formats(monkeypatch, *[NZ] * SLOTS, *[NZ] * (SLOTS - 1), ND)
    with pytest.raises(UnsupportedEngineError, match=r"w2_weight_list with experts in .* formats 2 and 29"):
        expert_weights(host, quantised=True, move_quantised=True)


@pytest.mark.parametrize(("remote_format", "differ"), [(ND, True), (NZ, False)])
def test_every_rank_refuses_formats_that_differ_between_ranks(monkeypatch, remote_format, differ):
    def of_two_ranks(everyone, local_formats, group):
        everyone[:] = [local_formats, [[remote_format, ND]]]

    monkeypatch.setattr(weights.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(weights.dist, "all_gather_object", of_two_ranks)
    in_formats(monkeypatch, NZ, 0)
    layer = [[torch.zeros(2)] * SLOTS, [torch.zeros(2)] * SLOTS]
    if not differ:
        check_same_formats([layer], None)
        return
    with pytest.raises(
        UnsupportedEngineError, match=r"rank 1, whose experts' NPU formats differ .* same weight_nz_mode"
    ):
        check_same_formats([layer], None)


def test_torch_npu_is_asked_only_for_the_format_of_npu_tensors(monkeypatch):
    assert format_of(torch.zeros(2)) == ND
    fake = types.SimpleNamespace(get_npu_format=lambda tensor: tensor.format)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    assert format_of(types.SimpleNamespace(device=torch.device("cpu"), format=NZ)) == ND
    assert format_of(types.SimpleNamespace(device=types.SimpleNamespace(type="npu"), format=NZ)) == NZ


@pytest.mark.parametrize("kind", ["MXFP8", "W8A8MXFP"])
def test_mx_experts_have_the_same_tensors_under_the_names_of_both_releases(kind):
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    layer = weighted(kind, **{name: per_expert(1) for name in names})
    assert len(expert_weights(layer, quantised=True, move_quantised=True)) == len(names)


def test_tensors_replaced_by_the_host_are_detected():
    host = in_lists()
    moved_weights = expert_weights(host, quantised=True, move_quantised=True)
    heat = HeatRings(1, torch.device("cpu"), slots=SLOTS, experts=EXPERTS)
    layer = AscendLayer(host.log2phy, torch.zeros(EXPERTS, dtype=torch.int32), moved_weights, heat, 0, False)
    assert layer.expert_weights() is moved_weights
    # This mimics quant_apply_mlp, which converts the first expert's scales to a different dtype.
    host.w13_weight_scale_fp32_list[0] = host.w13_weight_scale_fp32_list[0].to(torch.bfloat16)
    with pytest.raises(UnsupportedEngineError, match="custom operators"):
        layer.expert_weights()


OTHER_SCALES = [scale.to(torch.bfloat16) for scale in SCALES]


@pytest.mark.parametrize(
    ("scales", "first_only", "reason"),
    [
        pytest.param((SCALES, SCALES), True, "first expert's scales", id="first"),
        pytest.param((SCALES, OTHER_SCALES), False, "new tensor", id="replaced"),
        pytest.param((None, None), True, None, id="float"),
        pytest.param(([SCALES[0]], [SCALES[0]]), True, None, id="one-tensor"),
        pytest.param((SCALES, SCALES), False, None, id="one-dtype"),
    ],
)
def test_expert_lists_that_the_host_would_misread_are_refused_unless_it_has_a_list_kernel(
    scales, first_only, reason
):
    refuse_misread_lists(*scales, first_only=first_only, kernel_for_lists=True)
    refused = nullcontext() if reason is None else pytest.raises(UnsupportedEngineError, match=reason)
    with refused:
        refuse_misread_lists(*scales, first_only=first_only, kernel_for_lists=False)


class MC2(types.SimpleNamespace):
    """Fake of vLLM-Ascend's ``MC2CommImpl``."""


def put_kernels(monkeypatch, release, fuses=True, kernel=False):
    """Install the modules that decide which kernels a release runs."""
    enabled = {"_custom_gmm_swiglu_enabled": lambda *_, **__: kernel}
    names = {"vllm_ascend.ops.fused_moe.moe_comm_method": {"MC2CommImpl": MC2}}
    names["vllm_ascend.ops.fused_moe.moe_mlp"] = enabled if release == "0.23" else {}
    if release != "0.23":
        names["vllm_ascend.ops.fused_moe.moe_utils"] = {
            **enabled,
            "enable_fusion_gmmswigluquant": lambda: fuses,
        }
    package = {name.rpartition(".")[2]: types.SimpleNamespace(**contents) for name, contents in names.items()}
    put_modules(monkeypatch, {"vllm_ascend.ops.fused_moe": package, **names})


def test_release_023_misreads_lists_only_under_mc2(monkeypatch):
    put_kernels(monkeypatch, "0.23")
    given = types.SimpleNamespace(weights=types.SimpleNamespace(w1_scale=SCALES, w2_scale=SCALES))
    refuse_lists(types.SimpleNamespace(use_fusion_ops=True), given)
    with pytest.raises(UnsupportedEngineError, match="first expert's scales"):
        refuse_lists(MC2(use_fusion_ops=True), given)


@pytest.mark.parametrize(
    ("comm", "activation", "kernels", "refused"),
    [
        (MC2, "silu", {}, True),
        (MC2, "silu", {"kernel": True}, False),
        (MC2, "silu", {"fuses": False}, True),
        (types.SimpleNamespace, "silu", {}, True),
        (types.SimpleNamespace, "silu", {"fuses": False}, False),
        (MC2, "swigluoai_uninterleave", {}, False),
        (MC2, "situ", {}, False),
    ],
)
def test_release_030_misreads_lists_if_it_fuses_an_activation_without_its_list_kernel(
    comm, activation, kernels, refused, monkeypatch
):
    put_kernels(monkeypatch, "0.30", **kernels)
    given = types.SimpleNamespace(
        layer=types.SimpleNamespace(w13_weight_scale_fp32_list=SCALES, w2_weight_scale_list=OTHER_SCALES),
        activation=activation,
    )
    fused = ("silu", "swigluoai_uninterleave")
    quant_method = types.SimpleNamespace(supports_fused_activation=lambda name: name in fused)
    with pytest.raises(UnsupportedEngineError, match="first expert") if refused else nullcontext():
        refuse_lists(comm(), given, quant_method)
