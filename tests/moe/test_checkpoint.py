"""A checkpoint's tensors must land in every slot of their expert, narrowed to the rank's part, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eplb_service.placement import Placement
from worker_agent.moe import DenseMoE, ExpertParallelMoE, MoEShape, seeded_experts
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


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_narrowed_by_shard(tp_size: int, transposed: bool):
    logical_S, width = [2, 0, 2], I // tp_size
    for tp_rank in range(tp_size):
        w13, w2 = weights(slots=3, tp_size=tp_size)
        if transposed:
            w13 = ExpertParameter(w13.tensor_S.transpose(1, 2).contiguous(), transposed=True)
            w2 = ExpertParameter(w2.tensor_S.transpose(1, 2).contiguous(), transposed=True)
        loading = loader(logical_S, "weight", w13, w2, tp_rank=tp_rank, tp_size=tp_size)
        tensors = {}
        for expert, shard, name, tensor in checkpoint("weight", (I, H), (H, I)):
            assert loading.load(name, tensor) == logical_S.count(expert)
            tensors[expert, shard] = tensor
        loading.finish()
        part = slice(tp_rank * width, (tp_rank + 1) * width)
        for slot, expert in enumerate(logical_S):
            got13, got2 = w13.tensor_S[slot], w2.tensor_S[slot]
            if transposed:
                got13, got2 = got13.T, got2.T
            assert torch.equal(got13[:width], tensors[expert, Shard.W1][part])
            assert torch.equal(got13[width:], tensors[expert, Shard.W3][part])
            assert torch.equal(got2, tensors[expert, Shard.W2][:, part])


@pytest.mark.parametrize(
    ("granularity", "w13_shape", "w2_shape", "w1_loaded", "w2_loaded", "w2_columns"),
    [
        (Granularity.CHANNEL, (I, 1), (H, 1), (I, 1), (H, 1), slice(None)),
        (Granularity.GROUP, (I, 3), (H, 2), (I, 3), (H, 4), slice(2, 4)),
        (Granularity.GROUP, (4, 3), (3, 1), (4, 3), (3, 2), slice(1, 2)),
    ],
    ids=["channel", "group of 2", "block of 2 x 2"],
)
def test_scales_are_narrowed_with_their_weights(
    granularity: Granularity,
    w13_shape: tuple[int, int],
    w2_shape: tuple[int, int],
    w1_loaded: tuple[int, int],
    w2_loaded: tuple[int, int],
    w2_columns: slice,
):
    """The second of two tensor-parallel ranks, which holds the second half of the rows of w1 and w3."""
    w13 = ExpertParameter(torch.zeros(1, *w13_shape), granularity)
    w2 = ExpertParameter(torch.zeros(1, *w2_shape), granularity)
    loading = loader([1], "weight_scale", w13, w2, tp_rank=1, tp_size=2)
    tensors = {}
    for expert, shard, name, tensor in checkpoint("weight_scale", w1_loaded, w2_loaded):
        loading.load(name, tensor)
        tensors[expert, shard] = tensor
    loading.finish()
    half = w13_shape[0] // 2
    assert torch.equal(w13.tensor_S[0, :half], tensors[1, Shard.W1][half:])
    assert torch.equal(w13.tensor_S[0, half:], tensors[1, Shard.W3][half:])
    assert torch.equal(w2.tensor_S[0], tensors[1, Shard.W2][:, w2_columns])


def test_a_scale_per_tensor_keeps_gate_and_up_apart():
    w13 = ExpertParameter(torch.zeros(2, 2), Granularity.TENSOR)
    w2 = ExpertParameter(torch.zeros(2, 1), Granularity.TENSOR)
    loading = loader([3, 1], "weight_scale", w13, w2, tp_rank=1, tp_size=2)
    tensors = {}
    for expert, shard, name, tensor in checkpoint("weight_scale", (), ()):
        loading.load(name, tensor)
        tensors[expert, shard] = tensor
    loading.finish()
    for slot, expert in enumerate([3, 1]):
        assert w13.tensor_S[slot].tolist() == [tensors[expert, Shard.W1], tensors[expert, Shard.W3]]
        assert w2.tensor_S[slot].tolist() == [tensors[expert, Shard.W2]]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.4.mlp.experts.0.up_proj.weight",
            (I, H),
            "is no expert tensor: expected model.layers.3",
        ),
        ("model.layers.3.mlp.experts.0.side_proj.weight", (I, H), "unknown projection 'side_proj'"),
        ("model.layers.3.mlp.experts.0.up_proj.zero_point", (I, H), "'zero_point' is none of weight"),
        (
            "model.layers.3.mlp.experts.4.up_proj.weight",
            (I, H),
            r"is of expert 4; the layer has experts 0\.\.3",
        ),
        (
            "model.layers.3.mlp.experts.0.up_proj.weight",
            (H, I),
            r"must have the shape \[8, 6\], got \[6, 8\]",
        ),
        (
            "model.layers.3.mlp.experts.3.down_proj.weight",
            (I, H),
            r"must have the shape \[6, 8\], got \[8, 6\]",
        ),
    ],
)
def test_an_extra_tensor_is_refused(name: str, shape: tuple[int, int], message: str):
    with pytest.raises(ValueError, match=f"layer 3: checkpoint tensor .*{message}"):
        loader([0, 1], "weight", *weights()).load(name, torch.zeros(shape))


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
    placement_RS = Placement.linear(1, E, 1, E).phy2log_LRS[0]
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
    tokens = (
        torch.randn(5, H),
        torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]]),
        torch.full((5, 2), 0.5),
    )
    torch.testing.assert_close(layer(*tokens), DenseMoE(shape, wanted)(*tokens))


@pytest.mark.parametrize("with_last_dimension", [False, True])
def test_a_w8a8_checkpoint_fills_the_quantized_layer(with_last_dimension: bool):
    shape = MoEShape(layer=3, experts=E, hidden=H, intermediate=I)
    placement_RS = Placement.linear(1, E, 1, E).phy2log_LRS[0]
    wanted = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape, seed=2), quantized=True)
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape, seed=1), quantized=True)
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), NAMES, layer.checkpoint_parameters())
    for suffix, (w13, w2) in wanted.checkpoint_parameters().items():
        for expert in range(E):
            gate, up = w13.tensor_S[expert].chunk(2)
            for shard, tensor in {Shard.W1: gate, Shard.W2: w2.tensor_S[expert], Shard.W3: up}.items():
                stored = tensor.unsqueeze(-1) if suffix == "weight_scale" and with_last_dimension else tensor
                assert loading.load(NAMES.tensor(expert, shard, suffix), stored.clone()) == 1
    loading.finish()
    for loaded, expected in zip(layer.expert_weights(), wanted.expert_weights(), strict=True):
        assert torch.equal(loaded, expected)


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
