"""Tests that ``make demo-vllm`` sends one drifting load to both servers, times tokens and reports confidence limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
from rich.console import Console

from benchmarks.vllm_serving.load import Answer, Request, drifting_requests, send, send_all
from benchmarks.vllm_serving.run import Watched, environment, measured_figures, rounds_of, server_options
from benchmarks.vllm_serving.score import (
    ALONE,
    BALANCED,
    Round,
    _moves,
    compare,
    complaint,
    figures,
    latency,
    ratios,
    summary,
)
from eplb_core.wire.generated.operator_pb2 import DeploymentStatus

REQUEST = Request(3, "data", "SELECT ", 4)
SWITCHED = {"layers_switched": 7, "experts_moved": 9, "bytes_moved": 10**6, "steps_lost": 0}
PAR = {"before": 1.5, "after": 1.1, "steps": 80}


def answer_of(text: str, shift: float = 0.0, error: str | None = None) -> Answer:
    ids = list(text.encode())
    candidates = [{str(token): -0.5 + shift, "a": -1.0, "b": -2.0} for token in ids]
    return Answer(ids, candidates, [0.1 * (place + 1) for place in range(len(ids))], error)


def _event(token: int, place: int) -> bytes:
    top = [{f"token_id:{token}": -0.5 - place, "token_id:0": -2.0}]
    choice = {"token_ids": [token], "logprobs": {"top_logprobs": top}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class _OpenAI(BaseHTTPRequestHandler):
    """A server that echoes the prompt's bytes, or behaves as the prompt requests."""

    bodies: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.send_response(500 if body["prompt"] == "refuse" else 200)
        self.end_headers()
        if body["prompt"] == "refuse":
            self.wfile.write(b"no room")
            return
        for place, token in enumerate(body["prompt"].encode()[: body["max_tokens"]]):
            self.wfile.write(_event(token, place))
        if body["prompt"] == "break":
            self.wfile.write(b'data: {"error": {"message": "engine died"}}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _server() -> Iterator[tuple[int, list[dict[str, object]]]]:
    bodies: list[dict[str, object]] = []
    handler = type("Handler", (_OpenAI,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1], bodies
        server.shutdown()


def test_a_stream_is_read_token_by_token_with_arrival_times() -> None:
    with _server() as (port, bodies):
        answer = send(port, REQUEST)
    assert (bytes(answer.token_ids), answer.error) == (b"SELE", None)
    assert [min(logprobs.values()) for logprobs in answer.candidates] == [-2.0, -2.0, -2.5, -3.5]
    assert len(answer.times) == 4
    assert answer.times == sorted(answer.times)
    assert (bodies[0]["seed"], bodies[0]["stream"]) == (3, True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("refuse", "status 500: no room"),
        ("break", "the server reports {'message': 'engine died'}"),
        ("abc", "3 of 4 tokens arrived"),
    ],
)
def test_a_failed_request_is_reported_in_its_answer(prompt: str, message: str) -> None:
    with _server() as (port, _):
        answer = send(port, Request(0, "data", prompt, 4))
    assert answer.error == message
    assert "refused" in str(send(port, REQUEST).error), "the server is gone"


def test_answers_are_in_the_order_of_the_requests() -> None:
    requests = [Request(number, "data", f"{number:04}", 4) for number in range(20)]
    with _server() as (port, _):
        answers = send_all(port, requests, 5)
    assert [bytes(answer.token_ids).decode() for answer in answers] == [
        request.prompt for request in requests
    ]


def test_the_load_drifts_and_depends_only_on_its_seed() -> None:
    requests = drifting_requests(40, seed=1)
    assert requests == drifting_requests(40, seed=1)
    assert requests != drifting_requests(40, seed=2)
    assert [request.phase for request in requests[::10]] == ["european", "code", "far scripts", "data"]
    assert all(len(request.prompt.encode()) + request.tokens <= 192 for request in requests)
    parts = rounds_of(requests=50, rounds=8, seed=0)
    assert [request.number for part in parts for request in part.requests] == list(range(50))
    assert [parts[0].phase, parts[-1].phase] == ["european", "data"]


def test_a_token_decided_by_rounding_does_not_count_as_a_wrong_answer() -> None:
    pairs = [
        (answer_of("same"), answer_of("same", 1e-6)),
        (answer_of("same"), answer_of("sane", 1e-6)),
        (answer_of("same"), answer_of("same", 0.1)),
        (answer_of("same"), answer_of("same", error="lost")),
    ]
    comparison = compare(*zip(*pairs, strict=True))
    assert comparison.pop("worst_difference") == pytest.approx(0.1)
    assert comparison == {"requests": 4, "identical": 1, "split_draws": 1, "different": 2}


def test_differences_after_the_first_different_token_are_ignored() -> None:
    first = answer_of("abcd")
    second = answer_of("abXd")
    second.candidates[2]["a"] += 0.25
    second.candidates[3]["a"] += 9.0
    assert compare([first], [second])["worst_difference"] == pytest.approx(0.25)
    second.candidates[1] = {"else": -1.0}
    assert compare([first], [second])["worst_difference"] == float("inf")


def test_latency_excludes_failed_answers() -> None:
    milliseconds = latency([answer_of("abc"), answer_of("abcdefgh", error="late")])
    assert [milliseconds[name] for name in ("first_p50", "token_p50", "token_p99")] == pytest.approx(
        [100.0] * 3
    )
    assert np.isnan(latency([])["first_p50"])


def _served(**of_balanced: object) -> list[Round]:
    rounds = []
    for number in range(2):
        answers = {kind: [answer_of("good"), answer_of("more")] for kind in (ALONE, BALANCED)}
        if number and of_balanced:
            answers[BALANCED][1] = answer_of(**of_balanced)  # type: ignore[arg-type]
        rounds.append(Round([REQUEST, REQUEST], answers))
    return rounds


def test_a_successful_run_has_no_complaint() -> None:
    rounds = _served()
    score = figures(rounds, SWITCHED, PAR)
    assert complaint(score) is None
    assert (score["identical"], score["tokens"][BALANCED], score["layers_switched"]) == (4, 16, 7)
    assert [(row["ratio"], row["low"], row["high"]) for row in score["latency_ratios"]] == [(1.0,) * 3] * 2
    assert json.loads(json.dumps(score)) == score
    console = Console(width=140, record=True)
    console.print(summary(score))
    text = console.export_text()
    assert "data: 2/2 identical" in rounds[0].line()
    assert "4 of 4 requests, 16 tokens" in text
    assert "1.100, while domains drift" in text


@pytest.mark.parametrize(
    ("of_balanced", "switched", "message"),
    [
        ({"text": "more", "error": "lost"}, SWITCHED, "1 requests failed"),
        ({"text": "more", "shift": 0.5}, SWITCHED, "1 of 4 answers differ"),
        ({"text": "more"}, dict.fromkeys(SWITCHED, 0), "no layer was switched"),
    ],
)
def test_an_unsuccessful_run_has_a_complaint_with_the_reason(
    of_balanced: dict[str, object], switched: dict[str, int], message: str
) -> None:
    assert message in str(complaint(figures(_served(**of_balanced), switched, PAR)))


def test_confidence_intervals_come_from_a_bootstrap_over_rounds() -> None:
    """The machine is ten times slower in one of the three rounds.

    The balanced server takes twice as long in every round.
    """
    rounds = [_served()[0] for _ in range(3)]
    for slow, part in zip((1.0, 10.0, 1.0), rounds, strict=True):
        for kind, seconds in ((ALONE, slow), (BALANCED, 2 * slow)):
            for answer in part.answers[kind]:
                answer.times = [seconds, 3 * seconds]
    assert [(row["low"], row["ratio"], row["high"]) for row in ratios(rounds)] == [
        pytest.approx((2.0,) * 3)
    ] * 2
    rounds[2].answers[BALANCED][1].times = [1.0, 7.0]
    first, each = ratios(rounds)
    assert first["low"] < first["high"] == each["low"] == pytest.approx(2.0)


def test_par_before_and_after_the_first_switch_counts_each_window_once() -> None:
    watched = Watched(None)  # type: ignore[arg-type]  # the service is not called
    assert np.isnan(watched.par()["before"])
    statuses = (0, 0.0, 0), (8, 1.5, 0), (16, 1.4, 0), (24, 1.3, 1), (24, 1.3, 1), (32, 1.1, 2)
    for steps, par, switched in statuses:
        watched.take(DeploymentStatus(steps_received=steps, par=par, layers_switched=switched))
    assert watched.par() == {"before": 1.4, "after": pytest.approx(1.2), "steps": 32}
    assert "PAR 1.100" in watched.line


def test_planning_is_paused_until_the_par_before_any_switch_is_measured() -> None:
    service = Mock()
    watched = Watched(service)
    with watched.left_alone():
        assert service.mock_calls == [call.pause("byte-moe")]
        watched.take(DeploymentStatus(steps_received=8, par=1.5))
    assert service.mock_calls == [call.pause("byte-moe"), call.resume("byte-moe")]
    with pytest.raises(KeyError), watched.left_alone():
        raise KeyError
    assert service.mock_calls[-1] == call.resume("byte-moe")


def test_only_the_balanced_server_gets_the_address_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_AGENT_SERVICE", "elsewhere:1")
    assert "EPLB_AGENT_SERVICE" not in environment(tmp_path, {})
    assert environment(tmp_path, {"EPLB_AGENT_SERVICE": "here:2"})["EPLB_AGENT_SERVICE"] == "here:2"
    command = server_options(ranks=2, redundant=8, sequences=4)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert json.loads(command[command.index("--eplb-config") + 1])["num_redundant_experts"] == 8


def test_moves_and_par_before_and_after_the_first_move_are_read_from_the_measured_lines(tmp_path):
    path = tmp_path / "eplb.jsonl"
    lines = [{"imbalance": 1.4}, {"fetched": 0}, {"imbalance": 1.2}, {"fetched": 5}, {"imbalance": 1.1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    switched, par = measured_figures(path)
    assert switched == {"layers_switched": 1, "experts_moved": 5, "bytes_moved": None, "steps_lost": 0}
    assert par == {"before": pytest.approx(1.3), "after": 1.1, "steps": 3}


def test_policy_mode_omits_the_bytes_moved_because_vllm_does_not_count_them():
    counts = {"layers_switched": 4, "experts_moved": 51}
    assert _moves(counts | {"bytes_moved": None})["moved"] == "51 experts"
    assert _moves(counts | {"bytes_moved": 2_500_000})["moved"] == "51 experts, 2.5 MB"
