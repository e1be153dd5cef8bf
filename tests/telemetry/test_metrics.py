"""Reported figures must be found in the registry, and gone once their deployment is."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.operator import MovePrice, Worth

DECODE = {"deployment": "decode"}


@pytest.fixture
def metrics() -> Metrics:
    reported = Metrics()
    for name in ("decode", "prefill"):
        reported.set("eplb_par_realised", 1.5, name, "0")
        reported.set("eplb_par_planned", 1.1, name, "1")
        reported.observe("eplb_solve_seconds", 0.1, name)
        reported.count("eplb_plans", name, "done")
    return reported


def series_of(metrics: Metrics, deployment: str) -> set[str]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name for sample in samples if sample.labels.get("deployment") == deployment}


def test_a_deployment_that_is_forgotten_leaves_no_series(metrics: Metrics) -> None:
    known = {"eplb_par_realised", "eplb_solve_seconds_bucket", "eplb_plans_total"}
    assert known <= series_of(metrics, "decode")
    before = series_of(metrics, "prefill")
    metrics.forget_layers("decode")
    assert series_of(metrics, "decode") & known == known - {"eplb_par_realised"}
    metrics.forget("decode")
    assert series_of(metrics, "decode") == set()
    assert series_of(metrics, "prefill") == before


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_seconds_that_cannot_be_are_left_out(metrics: Metrics, seconds: float) -> None:
    metrics.observe("eplb_transfer_seconds", seconds, "decode")
    assert "eplb_transfer_seconds_count" not in series_of(metrics, "decode")


def test_counters_of_a_new_deployment_begin_at_zero(metrics: Metrics) -> None:
    metrics.expect("new", ["kept"], ["done"])
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_decisions_total", {"deployment": "new", "result": "kept"}) == 0
    assert value_of("eplb_plans_total", {"deployment": "new", "outcome": "done"}) == 0
    assert value_of("eplb_steps_lost_total", {"deployment": "new"}) == 0


def worth(**changes: Any) -> Worth:
    facts: dict[str, Any] = {
        **dict.fromkeys(("left_alone_ms", "serving_ms", "best_ms"), 4.0),
        **dict.fromkeys(("gain_ms", "gain_low_ms", "gain_high_ms"), 1.0),
        "steps": 64,
        "best": "hindsight",
        "price_kind": "assumed",
        "price": "0.4 ms per layer",
    }
    return Worth(**facts | changes)


def test_worth_has_the_price_of_the_last_decision_alone_and_nothing_unknown(metrics: Metrics) -> None:
    metrics.report_worth("decode", worth(step_ms=20.0, tokens_per_second_won=5.0, best_ms=3.0))
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_experts_seconds", {**DECODE, "placement": "serving"}) == pytest.approx(4e-3)
    assert value_of("eplb_experts_seconds", {**DECODE, "placement": "best_known"}) == pytest.approx(3e-3)
    assert value_of("eplb_gain_low_seconds", DECODE) == pytest.approx(1e-3)
    assert value_of("eplb_step_seconds", DECODE) == pytest.approx(20e-3)
    metrics.report_worth("decode", worth(price_kind="fitted"))
    assert value_of("eplb_time_price_info", {**DECODE, "price": "fitted"}) == 1
    assert value_of("eplb_time_price_info", {**DECODE, "price": "assumed"}) is None
    assert not {"eplb_step_seconds", "eplb_gain_tokens_per_second"} & series_of(metrics, "decode")
    metrics.forget_layers("decode")
    assert not [name for name in series_of(metrics, "decode") if "seconds" in name and "solve" not in name]


def test_the_price_of_moves_is_that_of_the_last_decision_and_has_nothing_unknown(metrics: Metrics) -> None:
    metrics.report_move_price("decode", MovePrice(0.12, "assumed", "", 2.0, 0.05, 0.5))
    value_of = metrics.registry.get_sample_value
    assert value_of("eplb_move_price", DECODE) == 0.12
    assert value_of("eplb_move_cost_seconds", DECODE) == pytest.approx(2e-3)
    assert value_of("eplb_move_cost_seconds_per_byte", DECODE) == pytest.approx(5e-11)
    assert value_of("eplb_switch_cost_seconds", DECODE) == pytest.approx(5e-4)
    metrics.report_move_price("decode", MovePrice(0.3, "stated", ""))
    assert value_of("eplb_move_price", DECODE) == 0.3
    assert value_of("eplb_move_price_info", {**DECODE, "price": "stated"}) == 1
    assert value_of("eplb_move_price_info", {**DECODE, "price": "assumed"}) is None
    assert not [name for name in series_of(metrics, "decode") if "cost" in name]
    metrics.forget_layers("decode")
    assert not [name for name in series_of(metrics, "decode") if "move_price" in name]


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")]
)
def test_the_reader_chooses_the_format(metrics: Metrics, accept: str, kind: str) -> None:
    found, text = metrics.exposition(accept)
    assert found.startswith(kind)
    assert b"# TYPE eplb_steps_received" in text
