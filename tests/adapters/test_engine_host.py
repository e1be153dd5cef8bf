"""What all engines' hosts share: heat by pass, hooks around an engine's calls, and a trial of the layers' memory."""

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


ANYWHERE = pytest.mark.parametrize("known", [True, False], ids=["on the host", "as on a device"])


def rings_of(layers, known, **sizes):
    rings = HeatRings(layers, torch.device("cpu"), experts=3, **sizes)
    rings._host_passes = rings._host_passes if known else None
    return rings


@ANYWHERE
def test_heat_of_a_pass_lands_in_its_row_by_logical_expert(known):
    rings = rings_of(2, known, rows=2)
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
    # A pass without a call leaves its row, and the next one has a row of its own.
    for _ in range(2):
        run(rings)
    rings.record(None, chosen_LP, phy2log_LP)
    assert rings.sources_LWE[:, 0].tolist() == [[5, 2, 3], [7, 14, 5]]
    assert rings.sources_LWE[:, 1].tolist() == [[5, 2, 3], [7, 14, 5]]


@ANYWHERE
def test_a_pass_counts_once_however_it_is_cut_into_parts_and_not_where_it_fails_half_way(known):
    rings = rings_of(3, known)
    whole, in_parts, failed = [0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 1]
    for passes, layers in enumerate((whole, in_parts), start=1):
        for index in layers:
            rings.layer_runs(index, 3)
        assert int(rings.passes) == passes
    for index in failed:
        rings.layer_runs(index, 3)
    assert int(rings.passes) == 2
    run(rings, 3)
    assert int(rings.passes) == 3


def test_experts_that_are_not_as_they_were_written_are_refused_at_the_start():
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


def test_a_refusal_to_restore_ends_in_balancing_as_before():
    asked = []

    def refuses():
        raise RestoreError("not now")

    host = SimpleNamespace(restore=refuses, resume=lambda: asked.append("resume"))
    calls = {"before": methodcaller("restore"), "failed": methodcaller("resume")}
    with pytest.raises(RestoreError):
        engine_host.make_hook(lambda _: host, **calls)(lambda _: pytest.fail("it loads"), "worker")
    assert asked == ["resume"]
    assert engine_host.make_hook(lambda _: None, **calls)(lambda _: "loaded", "worker") == "loaded"
