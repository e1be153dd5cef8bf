"""Tests that a checkpoint's tensors, sliced to the rank's shard, are loaded into exactly their expert's slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eplb_lab.layer import DenseMoE, seeded_experts
from eplb_lab.layer.checkpoint import PROJECTIONS, ExpertLoader
from eplb_lab.layer.operators import reference
from eplb_lab.layer.quantization import W8A8
from eplb_lab.layer.weights import ExpertTensors, ExpertWeights
from tests.moe.cases import Case, alone, shared_of

PREFIX = "model.layers.3.mlp.experts"
E = 4
H = 6
I = 8  # noqa: E741
LOGICAL_S = [2, 0, 2]
FP8 = torch.float8_e4m3fn


def tensors(quantized: bool = False, tp_size: int = 1, fill: float = -1.0) -> ExpertTensors:
    """Return three slots with every kind of tensor."""
    width = I // tp_size
    weights = ExpertWeights(
        torch.full((3, 2 * width, H), fill),
        torch.full((3, H, width), fill),
        w13_bias_SI=torch.full((3, 2 * width), fill),
        w2_bias_SH=torch.full((3, H), fill),
    )
    held = ExpertTensors()
    held._hold(3, W8A8(reference).process_after_load(weights, torch.float32) if quantized else weights)
    return held


def checkpoint(quantized: bool) -> dict[str, torch.Tensor]:
    """Return random tensors for all experts, with a distinct value at every position."""
    generator = torch.Generator().manual_seed(0)
    tensors_by_name = {}
    for expert in range(E):
        for projection in PROJECTIONS:
            shape = (H, I) if projection == "down_proj" else (I, H)
            weight = torch.randn(shape, generator=generator)
            each = {"weight": weight, "bias": torch.randn(shape[0], generator=generator)}
            if quantized:
                int8, scale = reference.npu_dynamic_quant(weight)
                offset = torch.zeros(shape[0], 1)
                each |= {"weight": int8, "weight_scale": scale.unsqueeze(1), "weight_offset": offset}
            tensors_by_name |= {
                f"{PREFIX}.{expert}.{projection}.{suffix}": tensor for suffix, tensor in each.items()
            }
    return tensors_by_name


def loader(held: ExpertTensors, **more: Any) -> ExpertLoader:
    return ExpertLoader(held, E, LOGICAL_S, PREFIX, **more)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2)])
def test_every_slot_gets_the_ranks_shard_of_its_expert(quantized: bool, tp_rank: int, tp_size: int):
    held = tensors(quantized, tp_size)
    tensors_by_name = checkpoint(quantized)
    loading = loader(held, tp_rank=tp_rank, tp_size=tp_size)
    for name, tensor in reversed(tensors_by_name.items()):
        assert loading.load(name, tensor) == LOGICAL_S.count(int(name.split(".")[-3]))
    loading.finish()
    for slot, expert in enumerate(LOGICAL_S):
        for suffix in ("weight", "bias", *(["weight_scale"] if quantized else [])):
            gate, up, down = (tensors_by_name[f"{PREFIX}.{expert}.{name}.{suffix}"] for name in PROJECTIONS)
            if suffix == "weight_scale":
                gate, up, down = (each.squeeze(1) for each in (gate, up, down))
            expected_shard = torch.cat([each.chunk(tp_size)[tp_rank] for each in (gate, up)])
            assert torch.equal(getattr(held, f"w13_{suffix}")[slot], expected_shard)
            expected_shard = down.chunk(tp_size, dim=1)[tp_rank] if suffix == "weight" else down
            assert torch.equal(getattr(held, f"w2_{suffix}")[slot], expected_shard)


@pytest.mark.parametrize(
    ("quantized", "name", "tensor", "message"),
    [
        (False, "0.side_proj.weight", torch.zeros(I, H), "unknown projection 'side_proj'"),
        (
            False,
            "0.up_proj.zero_point",
            torch.zeros(I, H),
            "suffix 'zero_point'; it must be one of weight, bias",
        ),
        (
            False,
            "4.up_proj.weight",
            torch.zeros(I, H),
            r"belongs to expert 4, but the layer has experts 0\.\.3",
        ),
        (False, "0.up_proj.weight", torch.zeros(H, I), r"must have shape \[8, 6\], got \[6, 8\]"),
        (False, "2.down_proj.weight", torch.zeros(I, H), r"must have shape \[6, 8\], got \[8, 6\]"),
        (
            False,
            "gate_up_proj",
            torch.zeros(E, 2 * I, H),
            "is not an expert tensor; the name must be model.layers.3",
        ),
        (
            False,
            "0.up_proj.weight",
            torch.zeros(I, H).int(),
            "a floating-point dtype of 16 bits or more, got torch.int32",
        ),
        (False, "0.up_proj.weight", torch.zeros(I, H).to(FP8), "of 16 bits or more, got torch.float8_e4m3fn"),
        (True, "0.up_proj.weight", torch.zeros(I, H), "must have torch.int8, got torch.float32"),
        (True, "0.up_proj.weight", torch.zeros(I, H).int(), "must have torch.int8, got torch.int32"),
        (
            True,
            "0.up_proj.weight_offset",
            torch.ones(I, 1),
            "must be zeros, because the layer's quantisation",
        ),
        (True, "0.up_proj.weight_scale", torch.ones(I, 2), r"one scale for each output row, got \[8, 2\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_rejected(
    quantized: bool, name: str, tensor: torch.Tensor, message: str
):
    with pytest.raises(ValueError, match=f"layer 3: checkpoint tensor .*{message}"):
        loader(tensors(quantized)).load(f"{PREFIX}.{name}", tensor)


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_a_layer_loaded_from_a_checkpoint_equals_one_built_directly(quantization: str):
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(5,), quantized=quantization == "w8a8")
    built = alone(case)
    loaded = alone(case, experts=None)
    source = seeded_experts(case.shape, case.seed)
    loading = ExpertLoader(loaded, 4, range(4), PREFIX)
    for expert in range(4):
        w13_IH, w2_HI = source(expert)
        for projection, tensor in zip(PROJECTIONS, (*w13_IH.chunk(2), w2_HI), strict=True):
            loading.load(f"{PREFIX}.{expert}.{projection}.weight", tensor)
    loading.finish()
    loaded.process_after_load()
    for built_weight, loaded_weight in zip(built.expert_weights(), loaded.expert_weights(), strict=True):
        assert torch.equal(built_weight, loaded_weight)
    assert torch.equal(loaded(*case.step(0)), built(*case.step(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_modelslim_checkpoint_is_used_without_conversion(dtype: torch.dtype):
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(5,), hidden=H, intermediate=I, dtype=dtype)
    loaded = alone(case, experts=None, quantization="w8a8_dynamic")
    tensors_by_name = checkpoint(quantized=True)
    loading = ExpertLoader(loaded, E, range(E), PREFIX)
    for name, tensor in tensors_by_name.items():
        if not name.endswith("bias"):
            loading.load(name, tensor)
    loading.finish()
    loaded.process_after_load()
    assert loaded.w13_weight_scale.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)

    def scaled(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        names = (f"{PREFIX}.{expert}.{each}.weight" for each in PROJECTIONS)
        gate, up, down = (tensors_by_name[name] * tensors_by_name[f"{name}_scale"] for name in names)
        return torch.cat([gate, up]), down

    hidden_TH, ids_TK, weights_TK = case.step(0)
    expected_TH = DenseMoE(case.shape, scaled)(hidden_TH.float(), ids_TK, weights_TK)
    assert (loaded(*case.step(0)).float() - expected_TH).norm() <= 3e-2 * expected_TH.norm()
    with pytest.raises(
        ValueError, match="layer 3: int8 weights can only be loaded from a checkpoint; use quant"
    ):
        alone(case, quantization="w8a8_dynamic")


@pytest.mark.parametrize("kind", ["w4a8", "mxfp8", "fp8"])
@pytest.mark.parametrize("build", [alone, shared_of], ids=["layer", "shared experts"])
def test_an_unsupported_quantisation_is_rejected(kind: str, build: Any):
    case = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(5,))
    with pytest.raises(
        ValueError, match=f"layer 3: .*'{kind}' is not supported; use one of none, w8a8, w8a8_dyn"
    ):
        build(case, quantization=kind)


def test_a_missing_tensor_is_named_in_the_error():
    loading = loader(tensors())
    for name, tensor in checkpoint(quantized=False).items():
        if not name.endswith("2.down_proj.weight"):
            loading.load(name, tensor)
    with pytest.raises(ValueError, match=r"layer 3: .*\.2\.down_proj\.weight is missing \(1 in total\)"):
        loading.finish()


def test_a_tensor_parallel_rank_outside_its_group_is_rejected():
    with pytest.raises(ValueError, match=r"layer 3: tp_rank must be 0\.\.1, got 2"):
        loader(tensors(), tp_rank=2, tp_size=2)
