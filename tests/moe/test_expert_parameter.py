"""Each kind of a checkpoint's tensors must be narrowed to the rank's part as the weights that it belongs to."""

from __future__ import annotations

import pytest
import torch

from tests.moe.checkpoints import NAMES, E, H, I, checkpoint, loader, weights
from worker_agent.moe.checkpoint import CheckpointNames, ExpertLoader
from worker_agent.moe.expert_parameter import ExpertParameter, Granularity, Shard


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
