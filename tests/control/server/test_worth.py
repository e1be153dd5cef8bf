"""What balancing is worth is judged with every decision, reported alike everywhere, and rests on what is said."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from eplb_service.control.server.deciding import decider
from eplb_service.control.server.deciding.computing import DecisionInputs
from eplb_service.control.server.service import RunningService
from eplb_service.cost.curve import CostCurve
from eplb_service.figures import digits
from eplb_service.planner.plan import Plan
from eplb_service.wire.operator import Worth
from tests.control.fake_group import STEP_MICROS, FakeGroup, skewed_heat
from tests.control.server.test_operate import eplb
from tests.control.server.test_service import tick, until


def appraised(service: RunningService) -> bool:
    return all(task.done() for task in service.plane.decider._appraising.values())


async def balanced(service: RunningService, group: FakeGroup) -> None:
    """Have the ranks switch, and serve a whole window since."""
    await group.send_heat(skewed_heat(32))
    await group.carry_out(await group.hear_plan())
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None)
    await group.send_heat(skewed_heat(32, seed=1))
    await until(lambda: deployment.decisions.worth is not None and deployment.decisions.worth.gain_ms > 0)


async def test_status_and_metrics_show_worth_and_what_it_rests_on_while_its_ranks_are_there(
    service: RunningService, group: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await eplb(group, "status", "decode", "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"]["worth"] is None
    await balanced(service, group)
    assert await eplb(group, "status", "decode", "--json") == 0
    status = json.loads(capsys.readouterr().out)["status"]
    worth, forecast = status["worth"], status["forecast"]
    assert forecast["gain_low"] < forecast["gain"] < forecast["gain_high"]
    assert await eplb(group, "status", "decode") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    value = service.plane.deployments["decode"].decisions.worth
    assert value is not None
    assert worth["gain_ms"] == pytest.approx(value.gain_ms)
    assert worth["price_kind"] == "assumed"
    assert worth["best_ms"] <= worth["serving_ms"] < worth["left_alone_ms"]
    assert worth["step_ms"] == pytest.approx(STEP_MICROS / 1e3)
    assert worth["gain_percent"] == pytest.approx(
        100 * worth["gain_ms"] / (worth["step_ms"] + worth["gain_ms"])
    )
    assert worth["tokens_per_second_won"] > 0
    assert worth["verdict"] == "helps"
    assert "helps: +" in shown
    assert f"PAR {digits(forecast['gain'])} until the next decision" in shown
    tick(service.plane)
    reported, decode = service.plane._metrics.registry.get_sample_value, {"deployment": "decode"}
    price = service.plane.deployments["decode"].decisions.move_price
    assert price is not None
    assert reported("eplb_move_price", decode) == price.price
    assert reported("eplb_move_price_info", {**decode, "price": price.kind}) == 1
    assert reported("eplb_deployment_gain_low", decode) == forecast["gain_low"]
    assert reported("eplb_gain_seconds", decode) == pytest.approx(value.gain_ms / 1e3)
    assert reported("eplb_time_price_info", {**decode, "price": "assumed"}) == 1
    serving = {**decode, "placement": "serving"}
    assert reported("eplb_experts_seconds", serving) == pytest.approx(value.serving_ms / 1e3)
    assert reported("eplb_step_seconds", decode) == pytest.approx(STEP_MICROS / 1e6)
    await group.leave()
    await until(lambda: not service.plane.deployments["decode"].connected)
    tick(service.plane)
    assert reported("eplb_gain_seconds", decode) is None


async def test_an_appraisal_that_fails_costs_only_itself(
    service: RunningService, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no figures today")

    monkeypatch.setattr("eplb_service.control.server.deciding.decider.appraise", broken)
    await group.send_heat(skewed_heat(32))
    await group.carry_out(await group.hear_plan())
    deployment = service.plane.deployments["decode"]
    await until(lambda: deployment.ended_plan is not None and appraised(service))
    assert deployment.decisions.worth is None
    assert deployment.last_decision.startswith("plan 1")


async def test_what_an_older_decision_found_does_not_replace_what_a_newer_one_did(
    service: RunningService, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer_is_known, asked = threading.Event(), itertools.count()
    finished: list[int] = []
    appraise = decider.appraise

    def oldest_last(inputs: DecisionInputs, decided: Plan) -> tuple[Worth, CostCurve | None] | None:
        number = next(asked)
        if number == 0:
            assert newer_is_known.wait(60)
        found = appraise(inputs, decided)
        finished.append(number)
        return found

    monkeypatch.setattr(decider, "appraise", oldest_last)
    await balanced(service, group)
    newer_is_known.set()
    await until(lambda: 0 in finished and appraised(service))
    worth = service.plane.deployments["decode"].decisions.worth
    assert finished[-1] == 0
    assert worth is not None
    assert worth.gain_ms > 0
