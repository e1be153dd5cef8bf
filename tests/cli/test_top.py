"""Tests of ``eplb top``: it fits in the terminal and shows the service's figures."""

from __future__ import annotations

import io
import os
import termios

import pytest

from eplb_core.wire.generated import operator_pb2
from eplb_service.cli.top import _keys, render
from tests.cli.arguments import drawn
from tests.control.server.pictured import Pictured, messages


def look_at(look: Pictured, width: int = 80, height: int | None = None) -> list[str]:
    return drawn(render(look.known, look.whole, look.balance, width, height), width)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (120, 40), (200, 70)])
def test_a_large_deployment_fits_in_the_terminal(width: int, height: int) -> None:
    lines = look_at(messages(320, 61), width, height)
    rows = [line for line in lines if line.count("■") > 20]
    assert 8 <= len(rows) <= 61
    # Every rank has a cell and every layer has a row.
    assert rows[0].split()[0].startswith("0")
    assert rows[-1].split()[0].endswith("60")
    assert {line.count("■") for line in rows} == {min(320, width - 22)}


def test_every_layer_has_a_line_if_there_is_room() -> None:
    look = messages(8, 12, problems=("rank 3: [red]the host[/] is slow",))
    lines = look_at(look, 100)
    assert sum(line.count("■") == 8 for line in lines) == 12
    text = "\n".join(lines)
    assert "problem: rank 3: [red]the host[/] is slow" in text
    for layer in look.whole.layers:
        assert f"{layer.par:.3f}" in text
    assert "plan 17" in text
    assert "done: 4 of 4 layers" in text
    assert "rank 5: 96 steps dropped" in text


def test_a_terminal_of_24_lines_shows_the_key_figures() -> None:
    look = messages(
        320, 61, problems=tuple(f"rank {rank}: its transfer failed" for rank in range(9)), missing=(7,)
    )
    for agent in look.whole.agents:
        agent.dropped_steps = 3
    lines = look_at(look, 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for excerpt in (
        "decode  9 problems  61 layers x 256 experts on 320 ranks x 1 slots",
        "PAR now 1.4",
        "; initial layout 1.740; hottest rank 5; hottest layer 17",
        "problem: rank 1: its transfer failed",
        "and 7 more problems",
        "gain +6.12 ms per step, helps: +12.9 % of a step (99 %: +4.9 to +7.3 ms)",
        "redundancy 2.55 GB per rank; move price 0.35 ms per expert; switched 612 layers",
        "2 more: draft 1.070 paused, prefill 1.070 healthy",
        "PAR over",
        " s ago, done: 21 of 21 layers",
        "319 of 320 ranks connected on 40 nodes, at step 48,230, 12 steps lost",
        "more ranks",
    ):
        assert excerpt in text
    assert sum(line.count("■") > 20 for line in lines) >= 5


def test_the_initial_layout_is_drawn_as_a_line_in_the_chart() -> None:
    look = messages(8, 12)
    lines = look_at(look, 100)
    assert any("╌╌╌" in line for line in lines)
    assert any("initial 1.7" in line for line in lines)


def test_stale_figures_show_their_age() -> None:
    look = messages(8, 12)
    look.whole.status.idle_seconds = 400
    assert any("PAR 7 min ago 1." in line for line in look_at(look, 100))
    look.whole.status.par = 0
    look.whole.status.ClearField("worth")
    lines = look_at(look, 100)
    assert any(line.startswith("PAR 7 min ago -") for line in lines)
    assert not any(line.startswith("gain ") for line in lines)


@pytest.mark.parametrize(("pressed", "leaves"), [("q", True), ("x", False)])
def test_only_q_quits(pressed: str, leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal_fd = os.openpty()
    with os.fdopen(terminal_fd, "rb", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(terminal))
        before = termios.tcgetattr(terminal_fd)
        with _keys() as quits_within:
            assert not quits_within(0.0)
            os.write(keyboard, pressed.encode())
            assert quits_within(0.2) is leaves
        assert termios.tcgetattr(terminal_fd) == before
    os.close(keyboard)


def test_a_service_without_deployments_and_a_deployment_without_measurements_are_reported() -> None:
    assert drawn(render([], None, None, 80, None)) == ["no deployments yet: no agent has connected"]
    status = operator_pb2.DeploymentStatus(deployment="decode", ranks=4)
    whole = operator_pb2.GetStatusResponse(status=status)
    look = Pictured([status], whole, operator_pb2.GetBalanceResponse(), operator_pb2.GetHistoryResponse())
    lines = look_at(look, 80)
    assert "nothing measured yet" in lines
    assert lines[-1].startswith("0 of 4 ranks connected")
