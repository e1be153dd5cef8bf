"""A checkpoint's tensors must land in every slot of their expert, narrowed to the rank's part, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eplb_service.placement import Placement
from worker_agent.moe import Activation, DenseMoE, ExpertParallelMoE, MoEShape, seeded_biases, seeded_experts
from worker_agent.moe.checkpoint import CheckpointNames, ExpertLoader
from worker_agent.moe.expert_parameter import ExpertParameter, Granularity, Shard

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
            r"must have the shape \[8, 6\] for w3, got \[6, 8\]",
        ),
        (
            "model.layers.3.mlp.experts.3.down_proj.weight",
            (I, H),
            r"must have the shape \[6, 8\] for w2, got \[8, 6\]",
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


def two_parameters(
    granularity: Granularity, w13: tuple[int, ...], w2: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[ExpertParameter, ExpertParameter]:
    """Parameters of one slot."""
    return (
        ExpertParameter(torch.full((1, *w13), -1, dtype=dtype), granularity),
        ExpertParameter(torch.full((1, *w2), -1, dtype=dtype), granularity),
    )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_input_scale_is_one_for_gate_and_up(shape: tuple[int, ...]):
    w13, w2 = two_parameters(Granularity.EXPERT, (), ())
    loading = loader([2], "input_scale", w13, w2, tp_rank=1, tp_size=2)
    for shard, value in ((Shard.W1, 0.5), (Shard.W2, 0.25), (Shard.W3, 0.5)):
        assert loading.load(NAMES.tensor(2, shard, "input_scale"), torch.full(shape, value)) == 1
    loading.finish()
    assert (w13.tensor_S.tolist(), w2.tensor_S.tolist()) == ([0.5], [0.25])


@pytest.mark.parametrize("first", [Shard.W1, Shard.W3])
def test_input_scales_that_differ_are_refused(first: Shard):
    loading = loader([2], "input_scale", *two_parameters(Granularity.EXPERT, (), ()))
    other = Shard.W3 if first is Shard.W1 else Shard.W1
    loading.load(NAMES.tensor(2, first, "input_scale"), torch.tensor(0.5))
    with pytest.raises(ValueError, match="input_scale differs between w1 and w3 of expert 2, which share it"):
        loading.load(NAMES.tensor(2, other, "input_scale"), torch.tensor(0.75))


def test_column_orders_are_split_with_the_columns_of_w2():
    w13, w2 = two_parameters(Granularity.COLUMN, (H,), (I // 2,), torch.int32)
    loading = loader([1], "g_idx", w13, w2, tp_rank=1, tp_size=2)
    of_rows, of_columns = torch.arange(H, dtype=torch.int32), torch.arange(I, dtype=torch.int32)
    for shard in Shard:
        loading.load(NAMES.tensor(1, shard, "g_idx"), of_columns if shard is Shard.W2 else of_rows)
    loading.finish()
    assert w13.tensor_S[0].tolist() == of_rows.tolist()
    assert w2.tensor_S[0].tolist() == of_columns[I // 2 :].tolist()


@pytest.mark.parametrize(("suffix", "dtype"), [("zeros", torch.int32), ("weight_offset", torch.float32)])
def test_zero_points_and_offsets_go_the_way_of_their_scales(suffix: str, dtype: torch.dtype):
    w13, w2 = two_parameters(Granularity.GROUP, (2 * I, 3), (H, 4), dtype)
    loading = loader([3], suffix, w13, w2)
    given = {
        shard: torch.arange(24).view((H, 4) if shard is Shard.W2 else (I, 3)).to(dtype) + 100 * index
        for index, shard in enumerate(Shard)
    }
    for shard, tensor in given.items():
        loading.load(NAMES.tensor(3, shard, suffix), tensor)
    loading.finish()
    assert torch.equal(w13.tensor_S[0], torch.cat([given[Shard.W1], given[Shard.W3]]))
    assert torch.equal(w2.tensor_S[0], given[Shard.W2])


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_one_tensor_parallel_rank_alone_adds_the_second_bias(tp_rank: int):
    w13, w2 = two_parameters(Granularity.BIAS, (I,), (H,))
    loading = loader([0], "bias", w13, w2, tp_rank=tp_rank, tp_size=2)
    given = {shard: torch.randn(H if shard is Shard.W2 else I) for shard in Shard}
    for shard, tensor in given.items():
        loading.load(NAMES.tensor(0, shard, "bias"), tensor)
    loading.finish()
    part = slice(tp_rank * I // 2, (tp_rank + 1) * I // 2)
    assert torch.equal(w13.tensor_S[0], torch.cat([given[Shard.W1][part], given[Shard.W3][part]]))
    assert torch.equal(w2.tensor_S[0], given[Shard.W2] if tp_rank == 0 else torch.zeros(H))


@pytest.mark.parametrize("granularity", [Granularity.CHANNEL, Granularity.TENSOR])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_scale_of_gate_and_up_together_is_split(granularity: Granularity, interleaved: bool):
    """Half of each goes to the second of two tensor-parallel ranks, and not the second half of both."""
    per_row = granularity is Granularity.CHANNEL
    w13, w2 = two_parameters(granularity, (I,) if per_row else (2,), (H,) if per_row else (1,))
    names = CheckpointNames(NAMES.prefix, gate_up="w13", interleaved=interleaved)
    loading = ExpertLoader(3, E, [1], names, {"weight_scale": (w13, w2)}, tp_rank=1, tp_size=2)
    gate, up = torch.rand(2, I if per_row else 1)
    both = torch.stack([gate, up], dim=1).flatten() if interleaved else torch.cat([gate, up])
    assert loading.load(f"{NAMES.prefix}.1.w13.weight_scale", both) == 1
    kept = slice(I // 2, None) if per_row else slice(None)
    assert torch.equal(w13.tensor_S[0], torch.cat([gate[kept], up[kept]]))
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale of shape .* is missing"):
        loading.finish()


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
    placement_RS = Placement.linear(1, E, 1, E).phy2log_LRS[0][:, ::-1].copy()
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape), biases=seeded_biases(shape))
    names = CheckpointNames(NAMES.prefix, interleaved=interleaved, transposed=transposed)
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), names, layer.checkpoint_parameters())
    for name, tensor in gpt_oss_like(shape, transposed, interleaved).items():
        assert loading.load(name, tensor) == E
    loading.finish()
    dense = DenseMoE(shape, seeded_experts(shape, seed=2), biases=seeded_biases(shape, seed=2))
    tokens = torch.randn(5, H), torch.arange(10).view(5, 2) % E, torch.rand(5, 2)
    torch.testing.assert_close(layer(*tokens), dense(*tokens))


def test_experts_without_a_gate_have_two_matrices():
    shape = MoEShape(3, E, H, I, Activation.RELU2_NO_MUL)
    placement_RS = Placement.linear(1, E, 1, E).phy2log_LRS[0]
    layer = ExpertParallelMoE(shape, placement_RS, seeded_experts(shape))
    names = CheckpointNames(NAMES.prefix, gate="up_proj", up=None)
    parameters = layer.checkpoint_parameters()
    loading = ExpertLoader(3, E, placement_RS[0].tolist(), names, parameters)
    experts = seeded_experts(shape, seed=2)
    for expert in range(E):
        for projection, tensor in zip(("up_proj", "down_proj"), experts(expert), strict=True):
            loading.load(f"{NAMES.prefix}.{expert}.{projection}.weight", tensor)
    loading.finish()
    tokens = torch.randn(5, H), torch.arange(10).view(5, 2) % E, torch.rand(5, 2)
    torch.testing.assert_close(layer(*tokens), DenseMoE(shape, experts)(*tokens))
    with pytest.raises(ValueError, match="layer 3: weight has no gate, but the name of the up projection is"):
        ExpertLoader(3, E, placement_RS[0].tolist(), NAMES, parameters)


def test_offsets_of_a_symmetric_checkpoint_are_taken_where_they_are_zero():
    shape = MoEShape(layer=3, experts=E, hidden=H, intermediate=I)
    layer = ExpertParallelMoE(
        shape, Placement.linear(1, E, 1, E).phy2log_LRS[0], seeded_experts(shape), quantized=True
    )
    loading = ExpertLoader(3, E, [0], NAMES, layer.checkpoint_parameters())
    name = NAMES.tensor(0, Shard.W1, "weight_offset")
    assert loading.load(name, torch.zeros(I, 1)) == 1
    with pytest.raises(ValueError, match=r"weight_offset must be zeros: the layer's quantization is symm"):
        loading.load(name, torch.ones(I, 1))
    with pytest.raises(ValueError, match=r"must have the shape \[8\] for w1, got \[6, 1\]"):
        loading.load(name, torch.zeros(H, 1))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj", (E + 1, 2 * I, H), r"must have the 4 experts as first dimension, got \[5, 16, 6\]"),
        ("gate_up_proj", (), r"must have the 4 experts as first dimension, got \[\]"),
        ("gate_up_proj", (E, I, H), r"must have the shape \[8, 6\] for w1, got \[4, 6\]"),
        ("down_proj_scale", (E, H), "'scale' is none of weight"),
        ("side_proj", (E, I, H), "is no expert tensor: expected model.layers.3"),
    ],
)
def test_a_tensor_of_all_experts_that_does_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"layer 3: checkpoint tensor .*{message}"):
        loader([0, 1], "weight", *weights()).load(f"{NAMES.prefix}.{name}", torch.zeros(shape))
