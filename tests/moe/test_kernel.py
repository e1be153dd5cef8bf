"""Tests that the kernel combines compatible parts, overlaps other work with the exchange, and frees rows after use."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_lab.layer.compose import ModularKernel
from eplb_lab.layer.dispatch import DISPATCHERS, BatchedDispatcher, DispatchRequest
from eplb_lab.layer.experts import BatchedExperts, ExpertBatch
from eplb_lab.layer.operators import reference
from eplb_lab.layer.quantization import Unquantized
from eplb_lab.layer.rank_group import RankGroup
from tests.moe.cases import Case, alone

CASE = Case("all2allv", experts=6, slots=6, top_k=3, tokens=(7,))
SENDER = DISPATCHERS["all2allv"](RankGroup(None), 6, reference)
WEIGHTS = alone(CASE, phy2log_RS=CASE.placement(), log2phy_E=CASE.tables()[0])._weights()


def request_of(step: int = 0) -> DispatchRequest:
    return DispatchRequest(*CASE.step(0, step), torch.tensor(CASE.tables()[0]))


def test_mismatched_activation_formats_are_rejected():
    with pytest.raises(
        ValueError, match="the standard activation format, but BatchedExperts requires the bat"
    ):
        ModularKernel(SENDER, BatchedExperts())
    with pytest.raises(
        ValueError, match="BatchedDispatcher returns rows in the batched activation format, but Unq"
    ):
        ModularKernel(BatchedDispatcher(SENDER, 1, 6, 8), Unquantized(reference))


class Recorded:
    """Work that overlaps with the kernel. It records when it ran, and which rows still exist while outputs return."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.rows: list[weakref.ref[torch.Tensor]] = []
        self.alive: int | None = None

    def start(self) -> Callable[[], torch.Tensor]:
        self.events.append("part 1")
        return self.finish

    def finish(self) -> torch.Tensor:
        self.events.append("part 2")
        self.alive = sum(each() is not None for each in self.rows)
        return torch.ones(1)


def test_other_work_runs_while_tokens_are_in_transit():
    beside: Any = Recorded()

    def recorded(name: str, start: Callable[..., Any], *what: Any) -> Callable[[], Any]:
        receive = start(*what)
        beside.events.append(f"{name} sent")

        def received() -> Any:
            beside.events.append(f"{name} received")
            result = receive()
            if name == "combine":
                return result
            return dataclasses.replace(result, combine=partial(recorded, "combine", result.combine))

        return received

    sender: Any = SimpleNamespace(
        format=SENDER.format, dispatch=partial(recorded, "dispatch", SENDER.dispatch)
    )
    kernel = ModularKernel(sender, Unquantized(reference))
    (out_TH,), heat_S, extra = kernel.run([request_of()], WEIGHTS, torch.float32, [beside.start])
    torch.testing.assert_close(out_TH, CASE.dense()(*CASE.step(0)))
    assert int(heat_S.sum()) == 21
    assert len(extra) == 1
    assert beside.events == [
        "dispatch sent", "part 1", "dispatch received", "combine sent", "part 2", "combine received",
    ]  # fmt: skip


@pytest.mark.parametrize("batches", [1, 2])
def test_rows_and_outputs_are_released_before_outputs_return(batches: int):
    beside: Any = Recorded()

    class Watched(Unquantized):
        def apply(self, batch: ExpertBatch, *args: Any) -> torch.Tensor:
            out_NH = super().apply(batch, *args)
            beside.rows += [weakref.ref(batch.rows), weakref.ref(out_NH)]
            return out_NH

    kernel = ModularKernel(SENDER, Watched(reference))
    kernel.run([request_of(step) for step in range(batches)], WEIGHTS, torch.float32, [beside.start])
    assert len(beside.rows) == 2 * batches
    assert beside.alive == 0
