"""Requests are the same for a seed, and what a server answers to them, or fails to, is read token by token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.vllm_serving.load import Answer, Request, drifting_requests, send, send_all
from tests.benchmarks.vllm_serving.answers import REQUEST


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
def test_what_fails_is_in_theanswer_of(prompt: str, message: str) -> None:
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
