"""What is reported must be found in the registry, and gone once its deployment is."""

from __future__ import annotations

import pytest

from eplb_service.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    reported = Metrics()
    for name in ("decode", "prefill"):
        reported.layer_pars(name, [1.5, 0.0], {1: 1.1})
        reported.solve_seconds.labels(name).observe(0.1)
        reported.plans.labels(name, "done").inc()
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
    metrics.transferred("decode", seconds)
    metrics.committed("decode", seconds)
    assert not {"eplb_transfer_seconds_count", "eplb_commit_seconds_count"} & series_of(metrics, "decode")


def test_what_was_not_measured_has_no_series(metrics: Metrics) -> None:
    assert (
        metrics.registry.get_sample_value("eplb_par_realised", {"deployment": "decode", "layer": "1"}) is None
    )


def test_every_metric_has_the_prefix(metrics: Metrics) -> None:
    assert all(family.name.startswith("eplb_") for family in metrics.registry.collect())


@pytest.mark.parametrize(
    ("accept", "kind"), [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")]
)
def test_the_reader_chooses_the_format(metrics: Metrics, accept: str, kind: str) -> None:
    found, text = metrics.exposition(accept)
    assert found.startswith(kind)
    assert b"# TYPE eplb_steps_received" in text
