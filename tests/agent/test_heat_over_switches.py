"""Across many switches, the slots' loads match the ranks' source heat under the layout of each report's epochs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from eplb_core.wire.agent import Reporting
from eplb_core.wire.heat import HeatReport
from tests.agent import live
from tests.ranks import run_ranks

LAYERS = 2
RANKS = live.RANKS
STEPS = 112


def _reports(width: int, summed: bool) -> tuple[list[HeatReport], dict[tuple[int, int], Any]]:
    """Switch layers continuously; return the rank's heat reports and the placement of each layer at each epoch."""
    agent, layers, still = live.start(LAYERS, width, report_steps=4, vote_interval=2)
    agent._heat.adopt(4, Reporting(source_sums=summed))
    reports = list[HeatReport]()
    placed = {}

    def between(step: int) -> None:
        installed = agent.installed
        for layer, epoch in enumerate(installed.layer_epochs):
            placed[epoch, layer] = installed.placement.phy2log_LRS[layer]
        reports.extend(message for message in live.waiting(agent) if isinstance(message, HeatReport))
        if agent._switch.state.plan is None and step % 4 == 1 and step < STEPS - 16:
            changes = {layer: live.from_here(agent, step + layer, layer) for layer in range(LAYERS)}
            live.offer(agent, changes, step)

    live.drive(agent, layers, still, STEPS, between)
    agent.close()
    return reports, placed


@pytest.mark.parametrize(("width", "summed"), [(1, False), (4, True)], ids=["by step", "summed and dealt"])
def test_slot_loads_add_up_to_the_source_heat_of_each_expert(width: int, summed: bool) -> None:
    ranks = run_ranks(RANKS, _reports, width, summed)
    placed = ranks[0][1]
    blocks: dict[tuple[Any, ...], list[tuple[int, HeatReport]]] = defaultdict(list)
    for rank, (reports, _) in enumerate(ranks):
        for report in reports:
            blocks[report.first_step, report.steps, report.layer_epochs].append((rank, report))
    # All ranks start and end their reports at the same steps, and no report spans a switch.
    assert {len(block) for block in blocks.values()} == {RANKS}
    assert len({epochs for _, _, epochs in blocks}) > 2
    for (_, _, epochs), block in blocks.items():
        excess_LE = np.zeros((LAYERS, live.EXPERTS), dtype=np.int64)
        for rank, report in block:
            sent = report.source_sums_LE if summed else report.source_counts_TLE.sum(axis=0)
            excess_LE -= sent
            for layer, epoch in enumerate(epochs):
                np.add.at(
                    excess_LE[layer], placed[epoch, layer][rank], report.slot_counts_TLS[:, layer].sum(axis=0)
                )
        assert not excess_LE.any()
