"""Operator commands print the service's state, take effect, and report rejections in one line."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from eplb_core.wire.fields import MAX_VERSION
from eplb_core.wire.generated import agent_pb2
from eplb_service.control.core.leader import term_at
from eplb_service.control.server.service import RunningService, run_service
from tests.cli.published import checked_document
from tests.control.fake_group import (
    EXPERTS,
    LAYERS,
    RANKS,
    SLOTS,
    FakeGroup,
    FakeRank,
    first_placement,
    heat_report,
    hello_of,
    live_of,
    skewed_heat,
)
from tests.control.server.command_line import eplb
from tests.control.server.http_client import scrape
from tests.control.server.service_under_test import settings, tick, until


@pytest_asyncio.fixture
async def group(service: RunningService, group: FakeGroup) -> FakeGroup:
    """Return a connected group that has reported eight steps of heat."""
    await group.send_heat(skewed_heat(8))
    await until(lambda: service.plane.deployments["decode"].totals.steps_received == 8)
    return group


async def test_the_deployments_command_lists_every_deployment(
    group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "deployments", "--json") == 0
    (listed,) = checked_document("deployments", capsys.readouterr().out)["deployments"]
    assert (listed["deployment"], listed["agents_connected"], listed["epoch"]) == ("decode", RANKS, 0)
    assert listed["digest"] == f"{group.live.digest:#018x}"
    assert await eplb(group, "deployments") == 0
    assert "decode" in capsys.readouterr().out


async def test_the_status_command_shows_layers_and_agents(
    group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    async def status() -> Any:
        assert await eplb(group, "status", "decode", "--json") == 0
        return checked_document("status", capsys.readouterr().out)

    document = await status()
    assert document["status"]["steps_received"] == 8
    assert [layer["layer"] for layer in document["layers"]] == list(range(LAYERS))
    assert all(layer["par"] > 1 for layer in document["layers"])
    assert [(agent["connected"], agent["agent_version"]) for agent in document["agents"]] == [
        (True, "test")
    ] * RANKS
    assert [agent["staging_bytes"] for agent in document["agents"]] == [None] * RANKS, (
        "these agents predate the field"
    )
    assert await eplb(group, "status", "decode") == 0
    shown = capsys.readouterr().out
    assert f"{RANKS} of {RANKS} ranks connected on 2 nodes" in shown
    for rank, staged in ((0, 10), (2, 84_000_000)):
        beat = agent_pb2.Heartbeat(digest=group.live.digest, staging_bytes=staged, ring_bytes=1_500_000)
        await group.ranks[rank].say(heartbeat=beat)
    report = heat_report(group.live, 0, group.step, skewed_heat(8))
    report.dropped_steps = 5
    await group.ranks[0].say(heat_report=report)
    agents = document["agents"]
    while not (agents[0]["staging_bytes"] and agents[2]["staging_bytes"] and agents[0]["dropped_steps"]):
        agents = (await status())["agents"]
    assert [agent["staging_bytes"] for agent in agents] == [10, None, 84_000_000, None]
    assert [agent["dropped_steps"] for agent in agents] == [5, 0, 0, 0]


async def test_the_top_command_shows_the_load_of_every_rank(
    group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "top", "decode", "--once") == 0
    shown = capsys.readouterr().out
    assert f"{RANKS} of {RANKS} ranks connected on 2 nodes" in shown
    assert sum(line.count("■") == RANKS for line in shown.splitlines()) == LAYERS
    assert await eplb(group, "top", "absent", "--once") == 2
    assert "no deployment 'absent'" in capsys.readouterr().err


async def test_the_placement_command_prints_and_writes_the_current_placement(
    group: FakeGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.npz"
    assert await eplb(group, "placement", "decode", "--out", str(out)) == 0
    with np.load(out) as saved:
        np.testing.assert_array_equal(saved["phy2log"], group.live.placement.phy2log_LRS)
        assert saved["log2phy"].shape == (RANKS, LAYERS, EXPERTS)
    capsys.readouterr()
    assert await eplb(group, "placement", "decode", "--json") == 0
    assert np.array(checked_document("placement", capsys.readouterr().out)["phy2log"]).shape == (
        LAYERS,
        RANKS,
        SLOTS,
    )
    assert await eplb(group, "placement", "decode", "--json", "--out", str(tmp_path / "both.json")) == 0
    shown = capsys.readouterr()
    assert np.array(checked_document("placement", shown.out)["phy2log"]).shape == (LAYERS, RANKS, SLOTS)
    assert "wrote epoch 0 to" in shown.err
    assert (tmp_path / "both.json").exists()


async def test_rebalance_is_rejected_between_pause_and_resume(
    group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "pause", "decode", "--json") == 0
    assert checked_document("pause", capsys.readouterr().out)["paused"]
    assert await eplb(group, "rebalance", "decode") == 2
    assert "eplb: error: no decision can be made for 'decode': planning is paused" in capsys.readouterr().err
    assert await eplb(group, "resume", "decode", "--json") == 0
    assert not checked_document("resume", capsys.readouterr().out)["paused"]
    assert await eplb(group, "rebalance", "decode", "--json") == 0
    answer = checked_document("rebalance", capsys.readouterr().out)
    assert answer["plan_id"] == (await group.hear_plan())[0].plan_id


async def test_the_history_command_shows_the_verdicts_and_the_outcome_of_plans(
    group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "history", "decode") == 0
    assert "decode has had no plans yet" in capsys.readouterr().out
    assert await eplb(group, "rebalance", "decode") == 0
    plans = await group.hear_plan()
    await group.carry_out(plans)
    await group.send_heat(skewed_heat(8))
    capsys.readouterr()
    while True:
        assert await eplb(group, "history", "decode", "--json") == 0
        (reported,) = checked_document("history", capsys.readouterr().out)["plans"]
        if reported["outcome"]:
            break
        await asyncio.sleep(0.05)
    assert (reported["plan_id"], reported["outcome"], reported["committed"]) == (
        plans[0].plan_id,
        "done",
        len(plans[0].layers),
    )
    assert [verdict["layer"] for verdict in reported["verdicts"]] == list(range(LAYERS))
    moved = {layer.layer: len(layer.moves_M5) for layer in plans[0].layers}
    for verdict in reported["verdicts"]:
        assert verdict["changed"] is (verdict["layer"] in moved)
        assert verdict["moves"] == moved.get(verdict["layer"], 0)
        assert verdict["noise_floor"] <= verdict["par_planned"] <= verdict["par_seen"]
        assert verdict["reason"]
    assert await eplb(group, "history", "decode") == 0
    assert "done" in capsys.readouterr().out
    assert await eplb(group, "history", "decode", "--plan", str(reported["plan_id"])) == 0
    assert f"{len(moved)}/{len(moved)}" in capsys.readouterr().out
    assert await eplb(group, "history", "decode", "--plan", "1") == 2
    assert "decode has no plan 1 among its newest" in capsys.readouterr().err
    assert await eplb(group, "history", "nope") == 2


async def has_metrics(service: RunningService) -> bool:
    return any("decode" in labels for _, labels in await scrape(service))


async def test_the_forget_command_removes_the_history_the_metrics_and_the_pause(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "pause", "decode") == 0
    tick(service.plane)
    assert await has_metrics(service)
    assert await eplb(group, "forget", "decode") == 2
    assert "'decode' still has connections from ranks 0, 1, 2, 3" in capsys.readouterr().err
    await group.leave()
    await until(lambda: not service.plane.deployments["decode"].connected)
    assert await eplb(group, "forget", "decode", "--json") == 0
    captured = capsys.readouterr()
    assert checked_document("forget", captured.out) == {"deployment": "decode", "forgotten": True}
    audits = [line for line in captured.err.splitlines() if '"call": "Forget"' in line]
    assert ['"result": "done"' in line for line in audits] == [True]
    tick(service.plane)
    assert not await has_metrics(service)
    assert await eplb(group, "status", "decode") == 2
    await group.join()
    assert not service.plane.deployments["decode"].paused
    assert service.plane.deployments["decode"].totals.steps_received == 0


async def test_a_deployment_forgotten_during_a_tick_gets_no_metrics(
    service: RunningService, group: FakeGroup
) -> None:
    await group.leave()
    plane = service.plane
    await until(lambda: not plane.deployments["decode"].connected)
    ticking = plane.ticking()
    next(ticking)
    plane.forget("decode")
    for _ in ticking:
        pass
    assert not await has_metrics(service)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_departed_deployment_is_forgotten_unless_it_is_paused(paused: bool) -> None:
    async with (
        run_service(settings(forget_after_seconds=60)) as service,
        FakeGroup(service.address) as group,
    ):
        await group.join()
        plane = service.plane
        deployment = plane.deployments["decode"]
        plane.set_paused(deployment, paused)
        tick(plane)
        assert deployment.attendance.empty_since is None, "its ranks are connected"
        await group.leave()
        await until(lambda: not deployment.connected)
        tick(plane)
        since = deployment.attendance.empty_since
        assert since is not None
        assert "decode" in plane.deployments, "the ranks may reconnect"
        deployment.attendance = replace(deployment.attendance, empty_since=since - 61)
        tick(plane)
        assert ("decode" in plane.deployments) is paused


IN_2106 = term_at(1 << 32, 5)


async def test_the_lead_command_overrides_the_leader_term_of_a_service_with_a_wrong_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_settings = settings(store=str(tmp_path / "state.sqlite3"))
    async with run_service(stored_settings) as service, FakeGroup(service.address) as group:
        (welcome, *_) = await group.join(highest_term=IN_2106)
        assert welcome.leader_term < IN_2106
        await group.send_heat(skewed_heat(8))
        await until(lambda: service.plane.deployments["decode"].totals.steps_received == 8)
        assert await eplb(group, "rebalance", "decode") == 2
        assert f"leader term {welcome.leader_term} is lower than {IN_2106}" in capsys.readouterr().err
        assert await eplb(group, "status", "decode", "--json") == 0
        status = json.loads(capsys.readouterr().out)["status"]
        (problem,) = status["problems"]
        assert "2106-02-07 06:28:16 UTC" in problem
        assert problem.endswith("`eplb lead decode`")
        assert await eplb(group, "lead", "decode", "--json") == 0
        captured = capsys.readouterr()
        answer = checked_document("lead", captured.out)
        assert answer["raised"]
        assert answer["leader_term"] > IN_2106
        (audit_line,) = [line for line in captured.err.splitlines() if '"operator_call"' in line]
        assert (json.loads(audit_line)["call"], json.loads(audit_line)["result"]) == ("Lead", "done")
        # The ranks send a new Hello and learn the term before there is any plan.
        await until(lambda: not service.plane.deployments["decode"].connected)
        for welcome in await group.join(highest_term=IN_2106):
            assert welcome.leader_term == answer["leader_term"]
        await group.send_heat(skewed_heat(8))
        await until(lambda: service.plane.deployments["decode"].obstacle() is None)
        assert await eplb(group, "rebalance", "decode") == 0
        assert {plan.leader_term for plan in await group.hear_plan()} == {answer["leader_term"]}
        assert await eplb(group, "lead", "decode") == 0
        assert "no rank of decode has followed a service newer than this one" in capsys.readouterr().out
    async with run_service(stored_settings) as service, FakeGroup(service.address) as group:
        (welcome, *_) = await group.join(highest_term=answer["leader_term"])
        assert welcome.leader_term > answer["leader_term"], "a restart must not lose the raised term"
        prefill_rank = FakeRank(group.channel, 0)
        prefill_welcome = await prefill_rank.greet(
            hello_of(live_of(first_placement()), 0, deployment="prefill")
        )
        assert prefill_welcome.leader_term < IN_2106, "a wrong clock does not affect other deployments"
        prefill_rank.call.cancel()


async def test_the_lead_command_asks_for_an_engine_restart_if_there_is_no_higher_term(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with run_service(settings()) as service, FakeGroup(service.address) as group:
        await group.join(highest_term=MAX_VERSION - 1)
        assert await eplb(group, "lead", "decode") == 2
        assert "restart the engines" in capsys.readouterr().err
        assert await eplb(group, "lead", "nope") == 2
