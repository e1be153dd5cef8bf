"""A service that records writes what its ranks counted, across the switches that it made itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_service.atomic_write import OutputError
from eplb_service.control.server.service import running_service
from eplb_service.io.open_trace import open_trace
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, SLOTS, FakeGroup, skewed_heat
from tests.control.server.test_service import settings, until


async def test_recorded_heat_is_what_the_ranks_counted_before_and_after_a_plan(tmp_path: Path) -> None:
    async with running_service(settings(record=tmp_path)) as service, FakeGroup(service.address) as group:
        await group.join()
        for number in range(4):
            await group.send_heat(skewed_heat(8, seed=number))
        await group.carry_out(await group.hear_plan())
        deployment = service.plane.deployments["decode"]
        await until(lambda: deployment.ended_plan is not None)
        await group.send_heat(skewed_heat(8, seed=4))
        await until(lambda: deployment.totals.steps_received == 40)
    trace = open_trace(tmp_path / "decode-1.zarr")
    heat_TLE = np.concatenate([skewed_heat(8, seed=number) for number in range(5)])
    # Each of the ranks sends this heat from its own tokens.
    assert np.array_equal(trace.heat(0, trace.steps), RANKS * heat_TLE)
    sources_TRLE = trace.source_rows(0, 40)
    assert sources_TRLE is not None
    assert np.array_equal(sources_TRLE, np.broadcast_to(heat_TLE[:, None], (40, RANKS, *heat_TLE.shape[1:])))
    assert np.array_equal(trace.tokens(0, 40), RANKS * heat_TLE[:, 0].sum(axis=1))
    facts = trace.facts
    assert facts.phases[trace.phase_numbers(0, 1)[0]] == "decode"
    assert (facts.ranks, facts.slots, facts.bytes_per_expert) == (RANKS, SLOTS, BYTES_PER_EXPERT)
    assert facts.nodes_R == (0, 0, 1, 1)


async def test_a_missing_folder_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is no folder that traces can be written into"):
        async with running_service(settings(record=tmp_path / "absent")):
            pass
