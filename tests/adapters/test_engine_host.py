"""The common base of the engine hosts: heat per forward pass, hooks around engine calls, and the memory trial."""

from __future__ import annotations

from contextlib import nullcontext
from operator import methodcaller
from types import SimpleNamespace

import pytest
import torch

from worker_agent.adapters import engine_host
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.adapters.engine_host import HeatRings
from worker_agent.agent import RestoreError


def run(rings, layers=2):
    for index in range(layers):
        rings.layer_runs(index, layers)


EVERYWHERE = pytest.mark.parametrize("on_host", [True, False], ids=["on the host", "as on a device"])


def rings_of(layers, on_host, **sizes):
    rings = HeatRings(layers, torch.device("cpu"), experts=3, **sizes)
    rings._host_passes = rings._host_passes if on_host else None
    return rings


@EVERYWHERE
def test_the_heat_of_a_pass_is_written_to_its_row_by_logical_expert(on_host):
    rings = rings_of(2, on_host, rows=2)
    phy2log_LP = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    chosen_LP = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    for chosen in (None, chosen_LP):
        run(rings)
        rings.record(None, chosen, phy2log_LP)
    assert rings.sources_LWE[:, 0].sum() == 0
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]
    for chosen in (chosen_LP, None):
        run(rings)
        rings.record(None, chosen, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].sum() == 0
    # A pass without a call keeps its row, and the next pass uses a different row.
    for _ in range(2):
        run(rings)
    rings.record(None, chosen_LP, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]


@EVERYWHERE
def test_a_pass_in_pieces_is_counted_once_and_a_failed_pass_is_not_counted(on_host):
    rings = rings_of(3, on_host)
    complete = [0, 1, 2]
    split = [0, 0, 1, 1, 2, 2]
    failed = [0, 1]
    for passes, layers in enumerate((complete, split), start=1):
        for index in layers:
            rings.layer_runs(index, 3)
        assert int(rings.passes) == passes
    for index in failed:
        rings.layer_runs(index, 3)
    assert int(rings.passes) == 2
    run(rings, 3)
    assert int(rings.passes) == 3


def test_experts_with_overlapping_memory_are_rejected_at_startup():
    memory = torch.arange(5 * 8.0).view(-1, 8)
    tables = {"expert_map": torch.arange(4, dtype=torch.int32), "log2phy": torch.arange(4)}
    for weights, shared in (([memory[1:]], False), ([memory[1:], memory[:-1]], True)):
        layer = SimpleNamespace(expert_weights=lambda weights=weights: weights, **tables)
        before = memory.clone()
        with (
            pytest.raises(UnsupportedEngineError, match="tensor 0 of an expert") if shared else nullcontext()
        ):
            engine_host.move_and_back(layer)
        assert shared or torch.equal(memory, before)


def test_balancing_resumes_after_a_failed_restore():
    calls_of_host = []

    def fail():
        raise RestoreError("not now")

    host = SimpleNamespace(restore=fail, resume=lambda: calls_of_host.append("resume"))
    calls = {"before": methodcaller("restore"), "failed": methodcaller("resume")}
    with pytest.raises(RestoreError):
        engine_host.make_hook(lambda _: host, **calls)(
            lambda _: pytest.fail("the weights were loaded"), "worker"
        )
    assert calls_of_host == ["resume"]
    assert engine_host.make_hook(lambda _: None, **calls)(lambda _: "loaded", "worker") == "loaded"
