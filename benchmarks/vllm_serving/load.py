"""Requests whose domains drift, sent to an OpenAI server by a fixed number of clients, every token with its time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException

from worker_agent.model.traffic import Traffic

TEMPERATURE = 0.8
"""The likeliest byte alone soon loops; with a seed per request, draws are the same on every server."""

CANDIDATES = 5
"""Likeliest tokens whose log-probabilities are asked for."""

_ANSWER_SECONDS = 120.0
_FEWEST_TOKENS, _MORE_TOKENS, _STRIDE = 64, 80, 37


@dataclass(frozen=True)
class Request:
    """One request of the load.

    Parameters
    ----------
    number
        Place in the whole load; seeds the draws.
    phase
        What people ask at the time.
    domain, prompt
        What this one asks.
    tokens
        Tokens to generate.
    """

    number: int
    phase: str
    domain: str
    prompt: str
    tokens: int


@dataclass
class Answer:
    """What came back.

    Parameters
    ----------
    token_ids
        Of the bytes generated, in order.
    candidates
        For each of them, the log-probabilities of the likeliest tokens and of the drawn one, by token.
    times
        When each came, in seconds after the request was sent.
    error
        Why the request failed, or ``None``.
    """

    token_ids: list[int] = field(default_factory=list)
    candidates: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """The bytes that were generated, as people read them."""
        return bytes(self.token_ids).decode(errors="replace")


def drifting_requests(count: int, seed: int) -> list[Request]:
    """The whole load in order; the same for the same seed."""
    traffic = Traffic(count, rank=0, seed=seed)
    requests = []
    for number in range(count):
        domain, prompt = traffic.request(number, row=0)
        phase = traffic.phases[traffic.phase(number)]
        # Of different lengths, so that requests do not begin and end together.
        tokens = _FEWEST_TOKENS + number * _STRIDE % _MORE_TOKENS
        requests.append(Request(number, phase, domain, prompt.decode(), tokens))
    return requests


def send_all(
    port: int, requests: Sequence[Request], clients: int, on_answer: Callable[[Answer], None]
) -> list[Answer]:
    """Answers to all requests, each client sending its next one when the last is answered; in order of ``requests``."""

    def one(request: Request) -> Answer:
        answer = send(port, request)
        on_answer(answer)
        return answer

    with ThreadPoolExecutor(max_workers=clients, thread_name_prefix="client") as pool:
        return list(pool.map(one, requests))


def send(port: int, request: Request) -> Answer:
    """Send one request and read the answer token by token; what fails is in the answer."""
    body = {
        "prompt": request.prompt,
        "max_tokens": request.tokens,
        "temperature": TEMPERATURE,
        "seed": request.number,
        "logprobs": CANDIDATES,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
    }
    answer = Answer()
    connection = HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"status {response.status}: {response.read(500).decode(errors='replace')}"
            return answer
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            _take(answer, json.loads(line[len(b"data: ") :]), time.perf_counter() - began)
    except (OSError, HTTPException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    if answer.error is None and len(answer.token_ids) != request.tokens:
        answer.error = f"{len(answer.token_ids)} of {request.tokens} tokens came"
    return answer


def _take(answer: Answer, event: dict[str, object], seconds: float) -> None:
    """Add what one event of the stream holds."""
    if "error" in event:
        answer.error = f"the server reports {event['error']}"
        return
    for choice in event["choices"]:  # type: ignore[attr-defined]
        ids = choice.get("token_ids") or []
        answer.token_ids += ids
        answer.times += [seconds] * len(ids)
        answer.candidates += (choice.get("logprobs") or {}).get("top_logprobs", [])
