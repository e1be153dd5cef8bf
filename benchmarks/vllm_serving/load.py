"""Requests whose domains drift, sent to an OpenAI server by a fixed number of clients, every token with its time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from eplb_lab.model.serving import Traffic
from tests.engines.openai_server import ServerError, streamed_choices

_TEMPERATURE = 0.8
"""The likeliest byte alone soon loops; with a seed per request, draws are the same on every server."""
_CANDIDATES = 5
"""Likeliest tokens whose log-probabilities are asked for."""
_ANSWER_SECONDS = 120.0
_MIN_TOKENS, _MORE_TOKENS, _STRIDE = 64, 80, 37


@dataclass(frozen=True)
class Request:
    """One request: its place in the load, which seeds the draws, its phase, its text, and the tokens to generate."""

    number: int
    phase: str
    prompt: str
    tokens: int


@dataclass
class Answer:
    """A completion: the bytes generated, and when each came in seconds after the request; or why it failed.

    ``candidates`` are log-probabilities of the likeliest tokens and of the drawn one, by token, for each byte.
    """

    token_ids: list[int] = field(default_factory=list)
    candidates: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None


def drifting_requests(count: int, seed: int) -> list[Request]:
    """The whole load in order; the same for the same seed."""
    traffic = Traffic(count, rank=0, seed=seed)
    requests = []
    for number in range(count):
        _, prompt = traffic.request(number, row=0)
        phase = traffic.phases[traffic.phase(number)]
        # Of different lengths, so that requests do not begin and end together.
        tokens = _MIN_TOKENS + number * _STRIDE % _MORE_TOKENS
        requests.append(Request(number, phase, prompt.decode(), tokens))
    return requests


def send_all(port: int, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Answers in order of ``requests``; each client sends its next one when the last is answered."""
    with ThreadPoolExecutor(max_workers=clients, thread_name_prefix="client") as pool:
        return list(pool.map(lambda request: send(port, request), requests))


def send(port: int, request: Request) -> Answer:
    """Send one request and read the answer token by token; what fails is in the answer."""
    body = {
        "prompt": request.prompt,
        "max_tokens": request.tokens,
        "temperature": _TEMPERATURE,
        "seed": request.number,
        "logprobs": _CANDIDATES,
        "return_tokens_as_token_ids": True,
    }
    answer = Answer()
    try:
        for choice, seconds in streamed_choices(port, body, _ANSWER_SECONDS):
            ids = choice.get("token_ids") or []
            answer.token_ids += ids
            answer.times += [seconds] * len(ids)
            answer.candidates += (choice.get("logprobs") or {}).get("top_logprobs", [])
    except ServerError as error:
        answer.error = str(error)
    if answer.error is None and len(answer.token_ids) != request.tokens:
        answer.error = f"{len(answer.token_ids)} of {request.tokens} tokens came"
    return answer
