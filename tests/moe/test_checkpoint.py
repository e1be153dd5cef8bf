"""A checkpoint's tensors must land in every slot of their expert, narrowed to the rank's part, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.moe.cases import in_order
from worker_agent.moe import Activation, DenseMoE, ExpertParallelMoE, MoEShape, seeded_biases, seeded_experts
from worker_agent.moe.checkpoint import CheckpointNames, ExpertLoader, ExpertParameter, Granularity, Shard

NAMES = CheckpointNames("model.layers.3.mlp.experts")
E, H, I = 4, 6, 8  # noqa: E741


def checkpoint(
    suffix: str, w1: tuple[int, ...], w2: tuple[int, ...]
) -> Iterator[tuple[int, Shard, str, torch.Tensor]]:
    """Random tensors of all experts."""
    generator = torch.Generator().manual_seed(0)
    for expert in range(E):
        for shard in Shard:
            shape = w2 if shard is Shard.W2 else w1
            yield expert, shard, NAMES.tensor(expert, shard, suffix), torch.randn(shape, generator=generator)


def loader(
    logical_S: list[int], suffix: str, w13: ExpertParameter, w2: ExpertParameter, **tp: int
) -> ExpertLoader:
    return ExpertLoader(3, E, logical_S, NAMES, {suffix: (w13, w2)}, **tp)


def weights(slots: int = 2, tp_size: int = 1) -> tuple[ExpertParameter, ExpertParameter]:
    width = I // tp_size
    return ExpertParameter(torch.zeros(slots, 2 * width, H)), ExpertParameter(torch.zeros(slots, H, width))


def check_outputs(layer: ExpertParallelMoE, dense: DenseMoE) -> None:
    tokens = torch.randn(5, H), torch.arange(10).view(5, 2) % E, torch.rand(5, 2)
    torch.testing.assert_close(layer(*tokens), dense(*tokens))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("0.side_proj.weight", (I, H), "unknown projection 'side_proj'"),
        ("0.up_proj.zero_point", (I, H), "'zero_point' is none of weight"),
        ("4.up_proj.weight", (I, H), r"is of expert 4; the layer has experts 0\.\.3"),
        ("0.up_proj.weight", (H, I), r"must have the shape \[8, 6\] for w3, got \[6, 8\]"),
        ("3.down_proj.weight", (I, H), r"must have the shape \[6, 8\] for w2, got \[8, 6\]"),
        ("gate_up_proj", (E + 1, 2 * I, H), r"must have the 4 experts as first dimension, got \[5, 16, 6\]"),
        ("gate_up_proj", (), r"must have the 4 experts as first dimension, got \[\]"),
        ("gate_up_proj", (E, I, H), r"must have the shape \[8, 6\] for w1, got \[4, 6\]"),
        ("down_proj_scale", (E, H), "'scale' is none of weight"),
        ("side_proj", (E, I, H), "is no expert tensor: expected model.layers.3"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"layer 3: checkpoint tensor .*{message}"):
        loader([0, 1], "weight", *weights()).load(f"{NAMES.prefix}.{name}", torch.zeros(shape))


def test_a_missing_tensor_is_named():
    loading = loader([0, 1], "weight", *weights())
    for expert, shard, name, tensor in checkpoint("weight", (I, H), (H, I)):
        if (expert, shard) != (1, Shard.W2):
            loading.load(name, tensor)
    message = (
        r"layer 3: checkpoint tensor model.*\.1\.down_proj\.weight of shape \[6, 8\] is missing \(1 tensors"
    )
    with pytest.raises(ValueError, match=message):
        loading.finish()


def test_a_tensor_parallel_rank_that_is_not_there():
    with pytest.raises(ValueError, match="layer 3: there is no tensor-parallel rank 2 among 2"):
        loader([0, 1], "weight", *weights(), tp_rank=2, tp_size=2)


def test_a_layer_loaded_from_a_checkpoint_equals_its_dense_twin():
    shape = MoEShape(layer=3, experts=E, hidden=H, intermediate=I)
    placement_RS = in_order(E)
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape, seed=1))
    w13, w2 = (ExpertParameter(weight) for weight in layer.expert_weights())
    loading = loader(placement_RS[0].tolist(), "weight", w13, w2)
    wanted = seeded_experts(shape, seed=2)
    for expert in reversed(range(E)):
        w13_IH, w2_HI = wanted(expert)
        parts = {Shard.W1: w13_IH[:I], Shard.W2: w2_HI, Shard.W3: w13_IH[I:]}
        for shard, tensor in parts.items():
            loading.load(NAMES.tensor(expert, shard, "weight"), tensor)
    loading.finish()
    check_outputs(layer, DenseMoE(shape, wanted))


@pytest.mark.parametrize("with_last_dimension", [False, True])
def test_a_w8a8_checkpoint_fills_the_quantized_layer(with_last_dimension: bool):
    shape = MoEShape(layer=3, experts=E, hidden=H, intermediate=I)
    placement_RS = in_order(E)
    wanted = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape, seed=2), quantized=True)
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape, seed=1), quantized=True)
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), NAMES, layer.checkpoint_parameters())
    for suffix, (w13, w2) in wanted.checkpoint_parameters().items():
        if w13.zeros:
            continue
        for expert in range(E):
            gate, up = w13.tensor_S[expert].chunk(2)
            for shard, tensor in {Shard.W1: gate, Shard.W2: w2.tensor_S[expert], Shard.W3: up}.items():
                stored = tensor.unsqueeze(-1) if suffix == "weight_scale" and with_last_dimension else tensor
                assert loading.load(NAMES.tensor(expert, shard, suffix), stored.clone()) == 1
    loading.finish()
    for loaded, expected in zip(layer.expert_weights(), wanted.expert_weights(), strict=True):
        assert torch.equal(loaded, expected)


def gpt_oss_like(shape: MoEShape, transposed: bool, interleaved: bool) -> dict[str, torch.Tensor]:
    """A checkpoint whose tensors have all experts."""
    experts, biases = seeded_experts(shape, seed=2), seeded_biases(shape, seed=2)
    w13_EIH, w2_EHI = (torch.stack(each) for each in zip(*map(experts, range(E)), strict=True))
    w13_bias_EI, w2_bias_EH = (torch.stack(each) for each in zip(*map(biases, range(E)), strict=True))
    if interleaved:
        order_I = torch.arange(2 * I).view(2, I).t().flatten()
        w13_EIH, w13_bias_EI = w13_EIH[:, order_I], w13_bias_EI[:, order_I]
    if transposed:
        w13_EIH, w2_EHI = w13_EIH.transpose(1, 2), w2_EHI.transpose(1, 2)
    return {
        f"{NAMES.prefix}.gate_up_proj": w13_EIH,
        f"{NAMES.prefix}.gate_up_proj_bias": w13_bias_EI,
        f"{NAMES.prefix}.down_proj": w2_EHI,
        f"{NAMES.prefix}.down_proj_bias": w2_bias_EH,
    }


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tensors_of_all_experts_with_biases_fill_a_layer(transposed: bool, interleaved: bool):
    shape = MoEShape(3, E, H, I, Activation.SWIGLUOAI)
    placement_RS = in_order(E)[:, ::-1].copy()
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape), biases=seeded_biases(shape))
    names = CheckpointNames(NAMES.prefix, interleaved=interleaved, transposed=transposed)
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), names, layer.checkpoint_parameters())
    for name, tensor in gpt_oss_like(shape, transposed, interleaved).items():
        assert loading.load(name, tensor) == E
    loading.finish()
    dense = DenseMoE(shape, seeded_experts(shape, seed=2), biases=seeded_biases(shape, seed=2))
    check_outputs(layer, dense)


def test_experts_without_a_gate_have_two_matrices():
    shape = MoEShape(3, E, H, I, Activation.RELU2_NO_MUL)
    placement_RS = in_order(E)
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape))
    names = CheckpointNames(NAMES.prefix, gate="up_proj", up=None)
    parameters = layer.checkpoint_parameters()
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), names, parameters)
    experts = seeded_experts(shape, seed=2)
    for expert in range(E):
        for projection, tensor in zip(("up_proj", "down_proj"), experts(expert), strict=True):
            loading.load(f"{NAMES.prefix}.{expert}.{projection}.weight", tensor)
    loading.finish()
    check_outputs(layer, DenseMoE(shape, experts))
    with pytest.raises(ValueError, match="layer 3: weight has no gate, but the name of the up projection is"):
        ExpertLoader(3, E, placement_RS[0].tolist(), NAMES, parameters)


def test_offsets_of_a_symmetric_checkpoint_are_taken_where_they_are_zero():
    shape = MoEShape(layer=3, experts=E, hidden=H, intermediate=I)
    layer = ExpertParallelMoE(shape, in_order(E), seeded_experts(shape), quantized=True)
    loading = ExpertLoader(3, E, [0], NAMES, layer.checkpoint_parameters())
    name = NAMES.tensor(0, Shard.W1, "weight_offset")
    assert loading.load(name, torch.zeros(I, 1)) == 1
    with pytest.raises(ValueError, match=r"weight_offset must be zeros: the layer's quantization is symm"):
        loading.load(name, torch.ones(I, 1))
    with pytest.raises(ValueError, match=r"must have the shape \[8\] for w1, got \[6, 1\]"):
        loading.load(name, torch.zeros(H, 1))


KINDS = {
    "weight": (Granularity.WEIGHT, (I, H), (H, I), 0, 1),
    "channel": (Granularity.CHANNEL, (I, 1), (H, 1), 0, None),
    "bias": (Granularity.BIAS, (I,), (H,), 0, None),
}
"""Shapes of a checkpoint's w1 and w2, and the dimension of each that tensor-parallel ranks split."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_each_kind_is_narrowed_to_the_ranks_part_in_every_slot_of_its_expert(
    kind: str, tp_rank: int, dtype: torch.dtype
):
    granularity, w1_shape, w2_shape, w1_split, w2_split = KINDS[kind]

    def own(tensor: torch.Tensor, split: int | None) -> torch.Tensor:
        return tensor if split is None else tensor.chunk(2, dim=split)[tp_rank]

    def expected(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        w1, w2, w3 = (given[expert, shard] for shard in Shard)
        if granularity is Granularity.BIAS and tp_rank:
            w2 = torch.zeros_like(w2)
        return torch.cat([own(w1, w1_split), own(w3, w1_split)]), own(w2, w2_split)

    given, named = {}, {}
    for expert, shard, name, tensor in checkpoint("suffix", w1_shape, w2_shape):
        given[expert, shard] = (10 * tensor).to(dtype)
        named[name] = expert, given[expert, shard]
    logical_S = [2, 0, 2]
    w13, w2 = (
        ExpertParameter(torch.full((3, *like.shape), -1, dtype=dtype), granularity) for like in expected(0)
    )
    loading = loader(logical_S, "suffix", w13, w2, tp_rank=tp_rank, tp_size=2)
    for name, (expert, tensor) in named.items():
        assert loading.load(name, tensor) == logical_S.count(expert)
    loading.finish()
    for slot, expert in enumerate(logical_S):
        for parameter, wanted in zip((w13, w2), expected(expert), strict=True):
            assert torch.equal(parameter.tensor_S[slot], wanted)


@pytest.mark.parametrize(
    ("own", "loaded", "message"),
    [
        (torch.int8, torch.float32, "must have torch.int8, got torch.float32"),
        (torch.int8, torch.int32, "must have torch.int8, got torch.int32"),
        (torch.float32, torch.int8, "must have a floating-point dtype, got torch.int8"),
        (torch.bfloat16, torch.float32, None),
    ],
)
def test_values_are_never_cast_to_other_numbers(own: torch.dtype, loaded: torch.dtype, message: str | None):
    w13 = ExpertParameter(torch.zeros(1, 2 * I, H, dtype=own))
    w2 = ExpertParameter(torch.zeros(1, H, I, dtype=own))
    tensor = torch.full((I, H), 0.25).to(loaded)
    name = NAMES.tensor(0, Shard.W1, "weight")
    if message is None:
        assert loader([0], "weight", w13, w2).load(name, tensor) == 1
        assert torch.equal(w13.tensor_S[0, :I], tensor.to(own))
        return
    with pytest.raises(ValueError, match=message):
        loader([0], "weight", w13, w2).load(name, tensor)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_scale_of_gate_and_up_together_is_split(interleaved: bool):
    """Half of each goes to the second of two tensor-parallel ranks, and not the second half of both."""
    w13, w2 = (ExpertParameter(torch.full((1, width), -1.0), Granularity.CHANNEL) for width in (I, H))
    names = CheckpointNames(NAMES.prefix, gate_up="w13", interleaved=interleaved)
    loading = ExpertLoader(3, E, [1], names, {"weight_scale": (w13, w2)}, tp_rank=1, tp_size=2)
    gate, up = torch.rand(2, I)
    both = torch.stack([gate, up], dim=1).flatten() if interleaved else torch.cat([gate, up])
    assert loading.load(f"{NAMES.prefix}.1.w13.weight_scale", both) == 1
    assert torch.equal(w13.tensor_S[0], torch.cat([gate[I // 2 :], up[I // 2 :]]))
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale of shape .* is missing"):
        loading.finish()
