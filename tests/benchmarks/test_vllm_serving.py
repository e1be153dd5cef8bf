"""The comparison of two vLLM servers sees what differs, counts what fails, and keeps PARs before and after apart."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.vllm_serving import __main__ as demo
from benchmarks.vllm_serving.comparison import compare, largest_gap, latency
from benchmarks.vllm_serving.load import Answer, Request, drifting_requests, send, send_all
from benchmarks.vllm_serving.run import Plan, Watched
from benchmarks.vllm_serving.score import ALONE, BALANCED, Balance, Round, Switches, complaint, figures
from benchmarks.vllm_serving.screen import Screen, live, summary
from benchmarks.vllm_serving.server import Server, ServerError, Setting
from eplb_service.wire.generated.operator_pb2 import DeploymentStatus

REQUEST = Request(3, "data", "sql", "SELECT ", 4)
SWITCHES = Switches(layers_switched=7, experts_moved=9, bytes_moved=10**6, steps_lost=0)
BALANCE = Balance(1.5, 1.1, 80)


def _event(token: int, place: int) -> bytes:
    choice = {
        "token_ids": [token],
        "logprobs": {"top_logprobs": [{f"token_id:{token}": -0.5 - place, "token_id:0": -2.0}]},
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class _OpenAI(BaseHTTPRequestHandler):
    """Answers with the bytes of the prompt, or as the prompt says."""

    asked: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.send_response(500 if body["prompt"] == "refuse" else 200)
        self.end_headers()
        if body["prompt"] == "refuse":
            self.wfile.write(b"no room")
            return
        tokens = body["prompt"].encode()[: body["max_tokens"]]
        for place, token in enumerate(tokens):
            self.wfile.write(_event(token, place))
        if body["prompt"] == "break":
            self.wfile.write(b'data: {"error": {"message": "engine died"}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _server() -> Iterator[tuple[int, list[dict[str, object]]]]:
    asked: list[dict[str, object]] = []
    handler = type("Handler", (_OpenAI,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()
            thread.join()


def _answer(text: str, shift: float = 0.0, error: str | None = None) -> Answer:
    ids = list(text.encode())
    candidates = [{str(token): -0.5 + shift, "a": -1.0, "b": -2.0} for token in ids]
    return Answer(ids, candidates, [0.1 * (place + 1) for place in range(len(ids))], error)


def test_a_stream_is_read_token_by_token_with_its_times() -> None:
    with _server() as (port, asked):
        answer = send(port, REQUEST)
    assert (answer.text, answer.error) == ("SELE", None)
    assert [min(found.values()) for found in answer.candidates] == [-2.0, -2.0, -2.5, -3.5]
    assert len(answer.times) == 4
    assert answer.times == sorted(answer.times)
    assert asked[0]["seed"] == 3
    assert asked[0]["stream"] is True


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("refuse", "status 500: no room"),
        ("break", "the server reports {'message': 'engine died'}"),
        ("abc", "3 of 4 tokens came"),
    ],
)
def test_what_fails_is_in_the_answer(prompt: str, message: str) -> None:
    with _server() as (port, _):
        answer = send(port, Request(0, "data", "sql", prompt, 4))
    assert answer.error == message


def test_a_server_that_is_gone_fails_the_request_alone() -> None:
    with _server() as (port, _):
        pass
    assert "refused" in str(send(port, REQUEST).error)


def test_answers_come_in_the_order_of_the_requests() -> None:
    requests = [Request(number, "data", "sql", f"{number:04}", 4) for number in range(20)]
    seen: list[Answer] = []
    with _server() as (port, _):
        answers = send_all(port, requests, 5, seen.append)
    assert [answer.text for answer in answers] == [request.prompt for request in requests]
    assert len(seen) == 20


def test_the_load_drifts_and_is_the_same_for_a_seed() -> None:
    requests = drifting_requests(40, seed=1)
    assert requests == drifting_requests(40, seed=1)
    assert requests != drifting_requests(40, seed=2)
    assert [request.phase for request in requests[::10]] == ["european", "code", "far scripts", "data"]
    assert len({request.tokens for request in requests}) == 40
    assert all(len(request.prompt.encode()) + request.tokens <= 192 for request in requests)


def test_a_draw_that_rounding_decided_is_distinguished_from_a_wrong_answer() -> None:
    pairs = [
        (_answer("same"), _answer("same", 1e-6)),
        (_answer("same"), _answer("sane", 1e-6)),
        (_answer("same"), _answer("same", 0.1)),
        (_answer("same"), _answer("same", error="lost")),
    ]
    found = compare(*zip(*pairs, strict=True))
    assert (found.requests, found.identical, found.split_draws, found.different) == (4, 1, 1, 2)
    assert found.worst_difference == pytest.approx(0.1)


def test_differences_count_up_to_the_token_at_which_answers_part_and_no_further() -> None:
    one, other = _answer("abcd"), _answer("abXd")
    other.candidates[2]["a"] += 0.25
    other.candidates[3]["a"] += 9.0
    assert largest_gap(one, other) == pytest.approx(0.25)
    other.candidates[1] = {"else": -1.0}
    assert largest_gap(one, other) == float("inf")


def test_latency_is_that_of_answers_that_did_not_fail() -> None:
    found = latency([_answer("abc"), _answer("abcdefgh", error="late")])
    assert (found.first_p50, found.token_p50, found.token_p99) == pytest.approx((100.0, 100.0, 100.0))
    assert np.isnan(latency([]).first_p50)


def _served(**of_balanced: object) -> list[Round]:
    rounds = []
    for number in range(2):
        part = Round([REQUEST, REQUEST])
        part.answers = {
            ALONE: [_answer("good"), _answer("more")],
            BALANCED: [_answer("good"), _answer("more")],
        }
        if number and of_balanced:
            part.answers[BALANCED][1] = _answer(**of_balanced)  # type: ignore[arg-type]
        part.complete = {ALONE, BALANCED}
        rounds.append(part)
    return rounds


def test_a_run_without_fault_has_nothing_to_complain_of() -> None:
    found = figures(_served(), SWITCHES, BALANCE)
    assert complaint(found) is None
    assert (found["identical"], found["tokens"][BALANCED], found["layers_switched"]) == (4, 16, 7)
    assert found["latency_ratio_by_round"]["token_p50"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("of_balanced", "switches", "message"),
    [
        ({"text": "more", "error": "lost"}, SWITCHES, "1 requests failed"),
        ({"text": "more", "shift": 0.5}, SWITCHES, "1 of 4 answers differ"),
        ({"text": "more"}, Switches(0, 0, 0, 0), "no layer was switched"),
    ],
)
def test_what_a_run_does_not_show_is_named(
    of_balanced: dict[str, object], switches: Switches, message: str
) -> None:
    assert message in str(complaint(figures(_served(**of_balanced), switches, BALANCE)))


def test_rounds_and_summary_are_shown_on_a_terminal_and_logged_elsewhere() -> None:
    rounds = _served()
    painted = Console(force_terminal=True, width=140, record=True)
    with live(painted, rounds, lambda: "PAR 1.1") as screen:
        screen.doing("round 1")
    reported = Console(force_terminal=False, width=140, record=True)
    Screen(reported, rounds, lambda: "PAR 1.1").finished(rounds[0])
    reported.print(summary(figures(rounds, SWITCHES, BALANCE)))
    assert "2 + 2 of 2" in painted.export_text()
    text = reported.export_text()
    assert "data: 2/2 identical" in text
    assert "4 of 4 requests, 16 tokens" in text
    assert "1.100, while domains drift" in text


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


def _setting(folder: Path, script: str) -> Setting:
    """A server whose interpreter is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Setting(python, folder, ranks=2, redundant=8, sequences=4)


def test_a_server_that_ends_while_it_starts_is_reported_with_its_last_output(tmp_path: Path) -> None:
    setting = _setting(tmp_path, "echo no such kernel; exit 3")
    with (
        Server(setting, tmp_path / "log", {}) as server,
        pytest.raises(ServerError, match=r"vLLM ended while it started.*no such kernel"),
    ):
        server.wait_until_ready()


def test_a_server_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    setting = _setting(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    with Server(setting, tmp_path / "log", {}):
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
            time.sleep(0.01)
        child = Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 10
    while child.exists() and "zombie" not in (child / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or "zombie" in (child / "status").read_text()


def test_only_the_balanced_server_hears_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "elsewhere:1")
    setting = _setting(tmp_path, "")
    assert "EPLB_AGENT_SERVICE" not in setting.environment({})
    assert setting.environment({"EPLB_AGENT_SERVICE": "here:2"})["EPLB_AGENT_SERVICE"] == "here:2"
    command = setting.command(8000)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert json.loads(command[command.index("--eplb-config") + 1])["num_redundant_experts"] == 8


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
