"""Tests of a deployment's figures as text: commands and the web page show only known figures."""

from __future__ import annotations

from eplb_core.wire.generated import operator_pb2
from eplb_service.telemetry.deployment_figures import Figure, explanations, figures_of
from tests.control.server.pictured import messages


def status_of_64_ranks() -> operator_pb2.DeploymentStatus:
    return messages(64, 58).whole.status


def figures(status: operator_pb2.DeploymentStatus) -> dict[str, Figure]:
    return {figure.name: figure for group in figures_of(status).values() for figure in group}


def test_a_measured_gain_is_shown_as_time_with_a_verdict() -> None:
    gain = figures(status_of_64_ranks())["gain"]
    assert (gain.value, gain.tone) == ("+6.12 ms per step", "good")
    for part in ("helps: +12.9 % of a step (99 %: +4.9 to +7.3 ms)", "+3,210 tokens/s", "8.3 of 64 ranks"):
        assert part in gain.note


def test_a_gain_that_was_not_measured_shows_no_milliseconds() -> None:
    status = status_of_64_ranks()
    status.worth.ClearField("gain_ms")
    status.worth.verdict = "not measurable"
    status.worth.reason = "step time does not measurably depend on balance over 6 switches"
    gain = figures(status)["gain"]
    assert gain == Figure("gain", "PAR -33.9 %", f"time not measurable: {status.worth.reason}")
    status.worth.price_kind = "stated"
    status.worth.estimate_low_ms = 1.5
    status.worth.estimate_high_ms = 3.0
    estimate = "; estimate from the stated cost of tokens: +1.5 to +3 ms per step"
    assert figures(status)["gain"].note == gain.note + estimate


def test_a_move_price_without_times_is_shown_as_a_percentage_of_the_par() -> None:
    status = status_of_64_ranks()
    assert figures(status)["move price"].value == "0.35 ms per expert"
    status.move_price.ClearField("ms_per_move")
    assert figures(status)["move price"].value == "12.6 % of PAR"


def test_unknown_figures_are_omitted() -> None:
    status = operator_pb2.DeploymentStatus(deployment="decode", ranks=4)
    shown = figures(status)
    assert list(shown) == ["PAR now", "redundancy", "switched", "steps received"]
    assert shown["PAR now"] == Figure("PAR now", "-", "no measurements")
    assert explanations(status) == []


def test_figures_that_are_not_current_show_their_age() -> None:
    status = status_of_64_ranks()
    assert "PAR now" in figures(status)
    status.idle_seconds = 400
    assert "PAR 7 min ago" in figures(status)
