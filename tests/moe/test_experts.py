"""Experts, activations and their views must be what their definitions say, and shared ones the same in two parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tests.moe.cases import Case, alone, in_order
from tests.moe.simulated import run_simulated
from worker_agent.moe import (
    Activation,
    DenseMoE,
    ExpertParallelMoE,
    LayerOptions,
    MoEShape,
    Router,
    SharedExperts,
    seeded_experts,
)
from worker_agent.moe import layer as layer_module
from worker_agent.moe.dense import _plain_activation, dense_shared_experts
from worker_agent.moe.operators import reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shared_experts import SharedStream
from worker_agent.moe.weights import ExpertWeights, _movable_weights, build_weights


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_definition(activation: Activation, gate: float, up: float) -> float:
    """In Python's own numbers; without a gate ``gate`` is the only input."""
    if activation is Activation.SWIGLUOAI:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return gate * sigmoid(1.702 * gate) * (up + 1)
    kind = activation.value.removesuffix("_no_mul")
    inner = {
        "silu": gate * sigmoid(gate),
        "gelu": gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))),
        "relu2": max(gate, 0.0) ** 2,
    }[kind]
    return inner * up if activation.gated else inner


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_activation_is_its_definition(activation: Activation, dtype: torch.dtype):
    values = [-20.0, -7.5, -1.25, -0.5, 0.0, 0.75, 3.0, 7.25, 20.0]
    gate_N = torch.tensor([gate for gate in values for _ in values], dtype=dtype)
    up_N = torch.tensor(values * len(values), dtype=dtype)
    first = torch.stack([gate_N, up_N], dim=1) if activation.gated else gate_N.unsqueeze(1)
    pairs = zip(gate_N.tolist(), up_N.tolist(), strict=True)
    expected_N1 = torch.tensor([[by_definition(activation, *pair)] for pair in pairs], dtype=dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 2e-3}
    torch.testing.assert_close(_plain_activation(activation, first), expected_N1, **tolerance)
    out_N1 = torch.empty_like(expected_N1)
    found_N1 = activation.into(first.clone(), out_N1)
    assert found_N1.data_ptr() == out_N1.data_ptr()
    torch.testing.assert_close(out_N1, expected_N1, **tolerance)


DENSE = MoEShape(layer=1, experts=5, hidden=6, intermediate=4)


def test_each_token_is_the_weighted_sum_of_its_experts():
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(9, 6, generator=generator)
    weights_TK, ids_TK = Router(5, 2)(torch.randn(9, 5, generator=generator))
    experts = seeded_experts(DENSE)
    output_TH = DenseMoE(DENSE, experts)(hidden_TH, ids_TK, weights_TK)
    for token in range(9):
        expected_H = torch.zeros(6)
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            w13_IH, w2_HI = experts(expert)
            gate, up = w13_IH[:4] @ hidden_TH[token], w13_IH[4:] @ hidden_TH[token]
            expected_H += weight * (w2_HI @ (silu(gate) * up))
        torch.testing.assert_close(output_TH[token], expected_H)


def test_seeded_experts_differ_by_seed_layer_and_expert_only():
    other_layer = MoEShape(layer=2, experts=5, hidden=6, intermediate=4)
    drawn = [
        seeded_experts(DENSE, 0)(3),
        seeded_experts(DENSE, 0)(2),
        seeded_experts(DENSE, 1)(3),
        seeded_experts(other_layer, 0)(3),
    ]
    again = seeded_experts(DENSE, 0)(3)
    same = [torch.equal(w13, again[0]) and torch.equal(w2, again[1]) for w13, w2 in drawn]
    assert same == [True, False, False, False]


def test_views_are_rows_of_the_same_memory():
    named = {
        "w13_weight": torch.randn(3, 4, 5),
        "w2_weight": torch.randn(3, 5, 2),
        "w2_weight_scale": torch.randn(3, 7, 5).transpose(1, 2),
        "w13_weight_scale": torch.randn(3),
        "e_score_correction_bias": torch.randn(9),
        "shared_experts.up_proj.weight": torch.randn(3, 4),
        "gate.weight": torch.randn(9, 5),
        "_shared_experts.gate_up_proj.weight": torch.randn(3, 4),
        "_gate.weight": torch.randn(3, 5),
    }
    views = _movable_weights(0, 3, named.items())
    assert {name: list(view.shape) for name, view in views.items()} == {
        "w13_weight": [3, 20],
        "w2_weight": [3, 10],
        "w2_weight_scale": [3, 35],
        "w13_weight_scale": [3, 1],
    }
    for name, view in views.items():
        assert view.data_ptr() == named[name].data_ptr()
        view[1] = 42.0
        assert (named[name][1] == 42.0).all()
        assert not (named[name][0] == 42.0).any()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, 4), r"layer 6: w2_weight must have the shape \[3, \.\.\.\], got \[2, 4\]"),
        (torch.zeros(()), r"layer 6: w2_weight must have the shape \[3, \.\.\.\], got \[\]"),
        (torch.zeros(3, 8)[:, ::2], "layer 6: w2_weight must be contiguous"),
        (torch.zeros(3, 8, 4)[:, ::2], "layer 6: w2_weight must be contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_moved(tensor: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        _movable_weights(6, 3, [("w2_weight", tensor)])


SHARED = MoEShape(layer=4, experts=1, hidden=8, intermediate=10)


def float_weights(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    return build_weights(SHARED, seeded_experts(SHARED, seed=7), [0], dtype, "cpu")


def parts_and_whole(gated: bool, quantized: bool, dtype: torch.dtype = torch.float32):
    weights = float_weights(dtype)
    gate_H = torch.randn(8, generator=torch.Generator().manual_seed(1)).to(dtype) if gated else None
    whole = dense_shared_experts(weights.w13_SIH[0], weights.w2_SHI[0], gate_H)
    if quantized:
        weights = weights.quantize(reference)
    return SharedExperts(4, weights, reference, dtype, gate_H, whole=whole), whole


def part_of(weights: ExpertWeights, tp: RankGroup) -> ExpertWeights:
    """This rank's rows of gate and up, and its columns of down; all of w2's bias."""
    inner = weights.w2_SHI.shape[2]
    own = slice(tp.rank * inner // tp.size, (tp.rank + 1) * inner // tp.size)

    def gate_and_up(both_SI: torch.Tensor) -> torch.Tensor:
        return torch.cat([half[:, own] for half in both_SI.chunk(2, dim=1)], dim=1).contiguous()

    assert weights.w13_bias_SI is not None
    return ExpertWeights(
        gate_and_up(weights.w13_SIH),
        weights.w2_SHI[:, :, own].contiguous(),
        w13_bias_SI=gate_and_up(weights.w13_bias_SI),
        w2_bias_SH=weights.w2_bias_SH,
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_tensor_parallel_ranks_sum_up_to_the_whole(ranks: int, quantized: bool, gated: bool):
    generator = torch.Generator().manual_seed(2)
    weights = replace(
        float_weights(),
        w13_bias_SI=torch.randn(1, 20, generator=generator),
        w2_bias_SH=torch.randn(1, 8, generator=generator),
    )
    gate_H = torch.randn(8, generator=generator) if gated else None
    hidden_TH = torch.randn(7, 8, generator=generator)
    whole = SharedExperts(4, weights, reference, torch.float32, gate_H)
    expected_TH = whole.part2(hidden_TH, whole.part1(hidden_TH))

    def own(tp: RankGroup) -> torch.Tensor:
        part = part_of(weights, tp)
        part = part.quantize(reference) if quantized else part
        run = SharedExperts(4, part, reference, torch.float32, gate_H, tp=tp).beside(hidden_TH)
        run.during_dispatch()
        return run.during_combine()

    found = run_simulated(ranks, own)
    assert all(torch.equal(found[0], other_TH) for other_TH in found)
    tolerance = 3e-2 if quantized else 1e-6
    assert float((found[0] - expected_TH).norm() / expected_TH.norm()) <= tolerance


def test_a_whole_that_does_more_than_the_parts_is_refused_where_the_parts_are_made_and_later():
    shared, whole = parts_and_whole(gated=False, quantized=False)
    with pytest.raises(ValueError, match="layer 4: shared experts in two parts differ from the whole"):
        SharedExperts(
            4, float_weights(), reference, torch.float32, whole=lambda hidden_TH: whole(hidden_TH) + 1
        )
    with pytest.raises(
        ValueError, match=r"layer 4: shared experts in two parts differ from the whole by 0\.5"
    ):
        shared.verify(lambda hidden_TH: 2 * whole(hidden_TH))
    with pytest.raises(ValueError, match="differ from the whole by nan"):
        shared.verify(lambda hidden_TH: whole(hidden_TH) * torch.nan)
    with pytest.raises(ValueError, match=r"layer 4: shared experts give the shape \[8, 4\] as a whole"):
        shared.verify(lambda hidden_TH: whole(hidden_TH)[:, :4])


def test_weights_that_do_not_fit():
    weights = float_weights()
    with pytest.raises(ValueError, match=r"layer 4: shared experts' w13 must have the shape \[1, 2\*I, 8\]"):
        SharedExperts(4, ExpertWeights(weights.w13_SIH[:, :, :5], weights.w2_SHI), reference, torch.float32)
    with pytest.raises(ValueError, match=r"shared experts' gate must have the shape \[8\], got \[5\]"):
        SharedExperts(4, weights, reference, torch.float32, torch.zeros(5))


def test_a_layers_state_has_its_shared_experts():
    shared, _ = parts_and_whole(gated=True, quantized=True)
    shape = MoEShape(layer=4, experts=2, hidden=8, intermediate=6)
    layer = ExpertParallelMoE(
        shape, in_order(2), seeded_experts(shape), quantized=True, shared_experts=shared
    )
    names = {name.removeprefix("_shared_experts.") for name in layer.state_dict() if "shared" in name}
    assert names == {"w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "gate_H"}
    assert shared in layer.modules()
    # What balancing moves is the layer's own.
    assert [view.shape[0] for view in layer.get_expert_weights()] == [2] * 4


CASE = Case("all2allv", experts=4, slots=4, top_k=2, tokens=(5,))


class FakeStreams:
    """Streams that record what is queued on them, and which others each waits for."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, str]] = []
        self.model = FakeStream(self, "model")
        self._now = self.model

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def current_stream(self) -> FakeStream:
        return self._now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._now = self._now, stream
        yield
        self._now = before

    def queue(self, what: str) -> None:
        self.queued.append((self._now.name, what))


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams = streams
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.queued.append((self.name, f"wait for {other.name}"))


def layer_of(options: LayerOptions) -> ExpertParallelMoE:
    w13_IH, w2_HI = seeded_experts(MoEShape(9, 1, CASE.hidden, CASE.intermediate))(0)
    shared = SharedExperts(
        3, ExpertWeights(w13_IH.unsqueeze(0), w2_HI.unsqueeze(0)), reference, torch.float32
    )
    return alone(CASE, options, shared_experts=shared)


def test_shared_experts_wait_for_the_model_and_the_model_for_them(monkeypatch: pytest.MonkeyPatch):
    streams = FakeStreams()
    kept: list[tuple[int, str]] = []

    def recorded(tensor: torch.Tensor, stream: Any) -> None:
        kept.append((tensor.data_ptr(), stream.name))

    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    side = SharedStream(streams, torch.device("cpu"))
    monkeypatch.setattr(layer_module.SharedStream, "of", lambda device: side)
    layer = layer_of(LayerOptions(multistream=True))
    for owner, names in (
        (layer._paths["all2allv"].kernel, ("start_dispatch", "compute")),
        (layer._shared_experts, ("part1", "part2")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, queued(streams, name, getattr(owner, name)))
    tokens = CASE.step(0)
    out_TH = layer(*tokens)
    torch.testing.assert_close(out_TH, layer_of(LayerOptions())(*tokens))
    assert streams.queued == [
        ("side", "wait for model"),
        ("model", "start_dispatch"),
        ("side", "part1"),
        ("model", "compute"),
        ("side", "part2"),
        ("model", "wait for side"),
    ]
    assert kept[0] == (tokens[0].data_ptr(), "side")
    assert [name for _, name in kept] == ["side", "model"]


def queued(streams: FakeStreams, name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        streams.queue(name)
        return function(*args, **kwargs)

    return call


def test_a_cpu_has_no_streams():
    assert SharedStream.of(torch.device("cpu")) is None
    tokens = CASE.step(0)
    torch.testing.assert_close(
        layer_of(LayerOptions(multistream=True))(*tokens), layer_of(LayerOptions())(*tokens)
    )
