"""A run keeps ratios before the first switch and since apart, holds every request once, and ends with its reason."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.vllm_serving import __main__ as demo
from benchmarks.vllm_serving.run import Plan, Watched
from benchmarks.vllm_serving.score import Balance
from eplb_service.wire.generated.operator_pb2 import DeploymentStatus


def _status(steps: int, par: float, switched: int) -> DeploymentStatus:
    return DeploymentStatus(steps_received=steps, par=par, layers_switched=switched)


def test_ratios_are_those_before_the_first_switch_and_since_each_window_once() -> None:
    watched = Watched(None)  # it is asked for nothing
    assert np.isnan(watched.balance().before)
    for steps, par, switched in [
        (0, 0.0, 0),
        (8, 1.5, 0),
        (16, 1.4, 0),
        (24, 1.3, 1),
        (24, 1.3, 1),
        (32, 1.1, 2),
    ]:
        watched.take(_status(steps, par, switched))
    assert watched.balance() == Balance(before=1.4, after=pytest.approx(1.2), steps=32)
    assert "PAR 1.100" in watched.line()


class Paused:
    """A service that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pause(self, deployment: str) -> None:
        self.asked.append(f"pause {deployment}")

    def resume(self, deployment: str) -> None:
        self.asked.append(f"resume {deployment}")


def test_nothing_is_planned_until_balance_without_a_switch_was_seen() -> None:
    service = Paused()
    watched = Watched(service)  # type: ignore[arg-type]
    with watched.left_alone():
        assert service.asked == ["pause byte-moe"]
        watched.take(_status(8, 1.5, 0))
    assert service.asked == ["pause byte-moe", "resume byte-moe"]
    with pytest.raises(KeyError), watched.left_alone():
        raise KeyError
    assert service.asked[-1] == "resume byte-moe"


def test_rounds_hold_every_request_once() -> None:
    parts = Plan(requests=50, rounds=8, clients=4, seed=0).parts()
    assert [request.number for part in parts for request in part.requests] == list(range(50))
    assert [parts[0].phase, parts[-1].phase] == ["european", "data"]


def test_where_vllm_cannot_be_had_the_demo_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(_: object) -> Path:
        pytest.skip("no wheel for this machine")

    monkeypatch.setattr(demo, "python_of", nothing)
    monkeypatch.setattr(sys, "argv", ["demo-vllm"])
    assert demo.main() == 2
    assert "vLLM with the agent cannot be had: no wheel for this machine" in capsys.readouterr().out


def test_figures_without_a_place_to_go_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo-vllm", "--json", "/nowhere/out.json"])
    with pytest.raises(SystemExit):
        demo.main()
    assert "there is no folder /nowhere" in capsys.readouterr().err
