"""Shared experts on a stream of their own must read after what they need was queued, and be waited for before use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.moe.cases import Case
from worker_agent.moe import ExpertParallelMoE, LayerOptions, SharedExperts, seeded_experts
from worker_agent.moe import placed_layer as layer_module
from worker_agent.moe.maps import initial_phy2log
from worker_agent.moe.operators import reference
from worker_agent.moe.shape import MoEShape
from worker_agent.moe.side_stream import SideStream
from worker_agent.moe.weights import ExpertWeights

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
    return ExpertParallelMoE(
        CASE.shape,
        initial_phy2log(CASE.experts, 1),
        seeded_experts(CASE.shape),
        shared_experts=shared,
        options=options,
    )


def test_shared_experts_wait_for_the_model_and_the_model_for_them(monkeypatch: pytest.MonkeyPatch):
    streams = FakeStreams()
    kept: list[tuple[int, str]] = []

    def recorded(tensor: torch.Tensor, stream: Any) -> None:
        kept.append((tensor.data_ptr(), stream.name))

    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    side = SideStream(streams, torch.device("cpu"))
    monkeypatch.setattr(layer_module.SideStream, "of", lambda device: side)
    layer = layer_of(LayerOptions(multistream=True))
    for owner, names in (
        (layer._paths["all2allv"].kernel, ("start_dispatch", "compute", "start_combine")),
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
        ("model", "start_combine"),
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
    assert SideStream.of(torch.device("cpu")) is None
    tokens = CASE.step(0)
    torch.testing.assert_close(
        layer_of(LayerOptions(multistream=True))(*tokens), layer_of(LayerOptions())(*tokens)
    )
