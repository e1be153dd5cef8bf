"""What is reported must be found in the registry, and gone once its deployment is."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_service.telemetry.metrics import Metrics
from eplb_service.wire.move_price import PricedMoves
from eplb_service.wire.worth import Worth


@pytest.fixture
def metrics() -> Metrics:
    reported = Metrics()
    for name in ("decode", "prefill"):
        reported.balance.layer_pars(name, [1.5, 0.0], {1: 1.1})
        reported.plans.solve_seconds.labels(name).observe(0.1)
        reported.plans.offered.labels(name, "done").inc()
    return reported


def series_of(metrics: Metrics, deployment: str) -> set[str]:
    return {
        sample.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("deployment") == deployment
    }


def test_a_deployment_that_is_forgotten_leaves_no_series(metrics: Metrics) -> None:
    assert {"eplb_par_realised", "eplb_solve_seconds_bucket", "eplb_plans_total"} <= series_of(
        metrics, "decode"
    )
    before = series_of(metrics, "prefill")
    metrics.forget("decode")
    assert series_of(metrics, "decode") == set()
    assert series_of(metrics, "prefill") == before


def test_layers_of_another_group_can_be_forgotten_alone(metrics: Metrics) -> None:
    metrics.forget_layers("decode")
    assert "eplb_par_realised" not in series_of(metrics, "decode")
    assert "eplb_plans_total" in series_of(metrics, "decode")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_seconds_that_cannot_be_are_left_out(metrics: Metrics, seconds: float) -> None:
    metrics.plans.transferred("decode", seconds)
    metrics.plans.committed("decode", seconds)
    assert not {"eplb_transfer_seconds_count", "eplb_commit_seconds_count"} & series_of(metrics, "decode")


def test_what_was_not_measured_has_no_series(metrics: Metrics) -> None:
    assert (
        metrics.registry.get_sample_value("eplb_par_realised", {"deployment": "decode", "layer": "1"}) is None
    )


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


def test_worth_has_the_price_of_the_last_decision_alone_and_nothing_that_is_not_known(
    metrics: Metrics,
) -> None:
    metrics.worth.report("decode", worth(step_ms=20.0, tokens_per_second_won=5.0))
    value_of = metrics.registry.get_sample_value
    served = {"deployment": "decode", "placement": "serving"}
    assert value_of("eplb_experts_seconds", served) == pytest.approx(4e-3)
    assert value_of("eplb_step_seconds", {"deployment": "decode"}) == pytest.approx(20e-3)
    metrics.worth.report("decode", worth(price_kind="fitted"))
    assert value_of("eplb_time_price_info", {"deployment": "decode", "price": "fitted"}) == 1
    assert value_of("eplb_time_price_info", {"deployment": "decode", "price": "assumed"}) is None
    assert not {"eplb_step_seconds", "eplb_gain_tokens_per_second"} & series_of(metrics, "decode")
    metrics.forget_layers("decode")
    assert not [name for name in series_of(metrics, "decode") if "seconds" in name and "solve" not in name]


def test_the_price_of_moves_is_that_of_the_last_decision_and_has_nothing_that_is_not_known(
    metrics: Metrics,
) -> None:
    metrics.worth.report_price("decode", PricedMoves(0.12, "assumed", "", 2.0, 0.05, 0.5))
    value_of = metrics.registry.get_sample_value
    of = {"deployment": "decode"}
    assert value_of("eplb_move_price", of) == 0.12
    assert value_of("eplb_move_cost_seconds", of) == pytest.approx(2e-3)
    assert value_of("eplb_move_cost_seconds_per_byte", of) == pytest.approx(5e-11)
    assert value_of("eplb_switch_cost_seconds", of) == pytest.approx(5e-4)
    metrics.worth.report_price("decode", PricedMoves(0.3, "stated", ""))
    assert value_of("eplb_move_price", of) == 0.3
    assert value_of("eplb_move_price_info", {**of, "price": "stated"}) == 1
    assert value_of("eplb_move_price_info", {**of, "price": "assumed"}) is None
    assert not [name for name in series_of(metrics, "decode") if "cost" in name]
    metrics.forget_layers("decode")
    assert not [name for name in series_of(metrics, "decode") if "move_price" in name]


def test_every_metric_has_the_prefix(metrics: Metrics) -> None:
    assert all(family.name.startswith("eplb_") for family in metrics.registry.collect())


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")]
)
def test_the_reader_chooses_the_format(metrics: Metrics, accept: str, kind: str) -> None:
    found, text = metrics.exposition(accept)
    assert found.startswith(kind)
    assert b"# TYPE eplb_steps_received" in text
