"""Ranks that have followed a service of a higher leader term follow this one by an order, and not before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eplb_service.control.core.leader import term_at
from eplb_service.control.server.service import running_service
from eplb_service.wire.fields import LAST_VERSION
from tests.cli.published import held
from tests.control.fake_group import FakeGroup, FakeRank, first_placement, hello_of, live_of, skewed_heat
from tests.control.server.test_operate import eplb
from tests.control.server.test_service import settings, until

IN_2106 = term_at(1 << 32, 5)


async def test_a_clock_that_was_once_wrong_is_overcome_by_an_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = settings(store=str(tmp_path / "state.sqlite3"))
    async with running_service(kept) as service, FakeGroup(service.address) as group:
        (welcome, *_) = await group.join(highest_term=IN_2106)
        assert welcome.leader_term < IN_2106
        await group.send_heat(skewed_heat(8))
        await until(lambda: service.plane.deployments["decode"].totals.steps_received == 8)
        assert await eplb(group, "rebalance", "decode") == 2
        assert f"leader term {welcome.leader_term} is older than {IN_2106}" in capsys.readouterr().err
        assert await eplb(group, "status", "decode", "--json") == 0
        status = json.loads(capsys.readouterr().out)["status"]
        (problem,) = status["problems"]
        assert "2106-02-07 06:28:16 UTC" in problem
        assert problem.endswith("`eplb lead decode`")
        assert await eplb(group, "lead", "decode", "--json") == 0
        captured = capsys.readouterr()
        answer = held("lead", captured.out)
        assert answer["raised"]
        assert answer["leader_term"] > IN_2106
        (audited,) = [line for line in captured.err.splitlines() if '"operator_call"' in line]
        assert '"call": "Lead"' in audited
        assert '"result": "done"' in audited
        # The ranks say Hello again, and hear of the term before there is a plan.
        await until(lambda: not service.plane.deployments["decode"].connected)
        for welcome in await group.join(highest_term=IN_2106):
            assert welcome.leader_term == answer["leader_term"]
        await group.send_heat(skewed_heat(8))
        await until(lambda: service.plane.deployments["decode"].obstacle() is None)
        assert await eplb(group, "rebalance", "decode") == 0
        assert {plan.leader_term for plan in await group.hear_plan()} == {answer["leader_term"]}
        assert await eplb(group, "lead", "decode") == 0
        assert "know of no service that is newer" in capsys.readouterr().out
    async with running_service(kept) as service, FakeGroup(service.address) as group:
        (welcome, *_) = await group.join(highest_term=answer["leader_term"])
        assert welcome.leader_term > answer["leader_term"], "a restart must not lose what was ordered"
        other = FakeRank(group.channel, 0)
        elsewhere = await other.greet(hello_of(live_of(first_placement()), 0, deployment="prefill"))
        assert elsewhere.leader_term < IN_2106, "a wrong clock is no other deployment's"
        other.call.cancel()


async def test_past_the_last_term_an_order_says_what_is_left_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_service(settings()) as service, FakeGroup(service.address) as group:
        await group.join(highest_term=LAST_VERSION - 1)
        assert await eplb(group, "lead", "decode") == 2
        assert "start the engines again" in capsys.readouterr().err
        assert await eplb(group, "lead", "nope") == 2
