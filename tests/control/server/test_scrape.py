"""A scrape over HTTP shows what happened to a deployment."""

from __future__ import annotations

import asyncio
import math
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from eplb_service.control.server.service import RunningService
from eplb_service.wire.generated import agent_pb2
from tests.control.fake_group import BYTES_PER_EXPERT, LAYERS, FakeGroup, skewed_heat
from tests.control.server.test_service import tick, until

Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_scrape_shows_what_happened(service: RunningService, group: FakeGroup) -> None:
    await group.fill_window()
    plans = await group.hear_plan()
    await group.carry_out(plans)
    await group.send_heat(skewed_heat(8, seed=1))
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None and deployment.totals.steps_received == 40)
    for calls in (100, 120):
        beat = agent_pb2.Heartbeat(
            step=group.step,
            epoch=group.live.epoch,
            digest=group.live.digest,
            calls=calls,
            call_micros=300 * calls,
            vote_micros=100 * calls,
            staging_bytes=50 * calls,
            ring_bytes=4096,
        )
        await group.ranks[1].say(heartbeat=beat)
        beat.staging_bytes = 7
        await group.ranks[2].say(heartbeat=beat)
    beats_R = service.plane.observer.of("decode").beats_R
    await until(lambda: {1, 2} <= set(beats_R) and all(beats_R[rank].calls == 120 for rank in (1, 2)))
    tick(service.plane)
    samples = await asyncio.to_thread(scrape, service.metrics_address)

    layers, decode = plans[0].layers, ("decode",)
    moves = sum(len(layer.moves_M5) for layer in layers)
    assert samples["eplb_agents_connected", decode] == 4
    assert samples["eplb_epoch", decode] == len(layers)
    assert samples["eplb_steps_received_total", decode] == 40
    assert samples["eplb_steps_lost_total", decode] == 0
    assert samples["eplb_layers_switched_total", decode] == len(layers)
    assert samples["eplb_moves_total", decode] == moves
    assert samples["eplb_moved_bytes_total", decode] == moves * BYTES_PER_EXPERT
    assert samples["eplb_plans_total", ("decode", "done")] == 1
    assert samples["eplb_decisions_total", ("decode", "plan")] == 1
    assert samples["eplb_solve_seconds_count", decode] == 1
    assert samples["eplb_problems", decode] == 0
    assert samples["eplb_agent_calls_total", decode] == 40
    assert math.isclose(samples["eplb_agent_call_seconds_total", decode], 0.012)
    assert math.isclose(samples["eplb_agent_vote_seconds_total", decode], 0.004)
    assert samples["eplb_agent_staging_bytes", decode] == 50 * 120, "of the rank that holds most"
    assert samples["eplb_agent_heat_ring_bytes", decode] == 4096
    seen, planned = (
        samples["eplb_deployment_par_seen", decode],
        samples["eplb_deployment_par_planned", decode],
    )
    assert 1.0 <= planned < seen
    for layer in range(LAYERS):
        assert 1.0 <= samples["eplb_par_realised", ("decode", str(layer))] < seen
    assert set(samples) >= {("eplb_par_planned", ("decode", str(layer.layer))) for layer in layers}
