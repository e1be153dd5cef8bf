"""Slots receive what sources sent: real layers keep that over switches, and one that does not is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from eplb_service.heat import assembler, conservation
from eplb_service.placement import default_log2phy
from eplb_service.wire.agent import Reporting, Shape
from eplb_service.wire.codec import encode
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.heat import HeatReport, decode_heat_report
from tests.agent import live
from tests.ranks import run_ranks
from worker_agent.swap import table_check

LAYERS, RANKS, STEPS, DAMAGED_AT = 2, live.RANKS, 160, 112


def _reports(width: int, summed: bool) -> tuple[list[HeatReport], dict[tuple[int, int], Any]]:
    """Heat of a rank whose layers switch all the time, and the slots of all ranks by epoch and layer.

    From one step on rank 1's table of layer 1 is another, which its agent does not look at.
    """
    table_check._BOUNDARIES = 1_000_000
    agent, layers, still = live.start(LAYERS, width, report_steps=4, vote_interval=2)
    agent._heat.adopt(4, Reporting(source_sums=summed))
    reports, placed = list[HeatReport](), {}

    def between(step: int) -> None:
        installed = agent.installed
        for layer, epoch in enumerate(installed.layer_epochs):
            placed[epoch, layer] = installed.placement.phy2log_LRS[layer]
        reports.extend(one for one in live.waiting(agent) if isinstance(one, HeatReport))
        if step == DAMAGED_AT and dist.get_rank() == 1:
            layers[1].log2phy.copy_(layers[1].log2phy.roll(1, dims=0))
        if agent._switch.state.plan is None and step % 4 == 1 and step < DAMAGED_AT - 32:
            live.offer(agent, {one: live.from_here(agent, step + one, one) for one in range(LAYERS)}, step)

    live.drive(agent, layers, still, STEPS, between)
    agent.close()
    return reports, placed


@pytest.mark.parametrize(("width", "summed"), [(1, False), (4, True)], ids=["by step", "summed and dealt"])
def test_real_ranks_conserve_tokens_over_switches_and_a_table_that_is_another_is_seen(
    width: int, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conservation, "_ONE_IN", 0)
    monkeypatch.setattr(assembler, "_EPOCHS_KEPT", 1_000)
    ranks = run_ranks(RANKS, _reports, width, summed)
    shape = Shape(RANKS, LAYERS, live.EXPERTS, live.SLOTS, 0, width)
    heat = assembler.HeatAssembler(shape, 256, 256)
    for (epoch, layer), slots_RS in ranks[0][1].items():
        heat.placements.place(layer, epoch, slots_RS, default_log2phy(slots_RS, live.EXPERTS, width))
    every = [
        (one.first_step, rank, decode_heat_report(encode(one, agent_pb2.HeatReport()), shape, 64))
        for rank, (own, _) in enumerate(ranks)
        for one in own
    ]
    sent = sorted(every, key=lambda one: one[:2])
    unpromised = conservation.Conservation(RANKS)
    epochs = {one.layer_epochs for first_step, _, one in sent if first_step < DAMAGED_AT}
    for first_step, rank, one in sent:
        if first_step == DAMAGED_AT:
            assert heat.conservation.breaches == []
        heat.take(rank, one)
        unpromised.add(rank, replace(one, conserved=rank != 2), heat.placements.slots(one.layer_epochs))
    assert len(epochs) > 4
    # All ranks cut at the same steps, and a report never spans a switch.
    cuts = [[(one.first_step, one.steps, one.layer_epochs) for one in own] for own, _ in ranks]
    assert cuts[0] == cuts[1] == cuts[2]
    assert [first + steps for first, steps, _ in cuts[0][:-1]] == [first for first, _, _ in cuts[0][1:]]
    assert heat.conservation.compared == len(sent) // RANKS
    (breach,) = heat.conservation.breaches
    assert (breach.layer, breach.steps.start > DAMAGED_AT, unpromised.compared) == (1, True, 0)
