"""Requests with drifting domains, which a fixed number of clients send to an OpenAI server. Every token is timed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from eplb_lab.model.serving import Traffic
from tests.engines.openai_server import ServerError, streamed_choices

_TEMPERATURE = 0.8
"""Sampling temperature. Greedy decoding would soon loop. A seed per request makes the draws equal on both servers."""
_CANDIDATES = 5
"""Number of most likely tokens whose log-probabilities are requested."""
_ANSWER_SECONDS = 120.0
_MIN_TOKENS = 64
_TOKEN_RANGE = 80
_STRIDE = 37


@dataclass(frozen=True)
class Request:
    """One request.

    Parameters
    ----------
    number
        Position in the load, which is also the seed for the draws.
    phase
        Name of the load's phase.
    prompt
        Prompt text.
    tokens
        Number of tokens to generate.
    """

    number: int
    phase: str
    prompt: str
    tokens: int


@dataclass
class Answer:
    """Completion of one request.

    Parameters
    ----------
    token_ids
        Generated tokens, one per byte.
    candidates
        For each token, the log-probabilities of the most likely tokens and of the drawn one.
    times
        Arrival time of each token, in seconds after the request.
    error
        Reason for a failure; ``None`` if the request succeeded.
    """

    token_ids: list[int] = field(default_factory=list)
    candidates: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None


def drifting_requests(count: int, seed: int) -> list[Request]:
    """Return the load in order. It depends only on the count and the seed."""
    traffic = Traffic(count, rank=0, seed=seed)
    requests = []
    for number in range(count):
        _, prompt = traffic.request(number, row=0)
        phase = traffic.phases[traffic.phase(number)]
        # Vary the answers' lengths, so that requests do not all begin and end at the same time.
        tokens = _MIN_TOKENS + number * _STRIDE % _TOKEN_RANGE
        requests.append(Request(number, phase, prompt.decode(), tokens))
    return requests


def send_all(port: int, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Send all requests and return their answers in the same order. Each client has one request open at a time."""
    with ThreadPoolExecutor(max_workers=clients, thread_name_prefix="client") as pool:
        return list(pool.map(lambda request: send(port, request), requests))


def send(port: int, request: Request) -> Answer:
    """Send one request and read the answer token by token. A failure is recorded in ``Answer.error``."""
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
        answer.error = f"{len(answer.token_ids)} of {request.tokens} tokens arrived"
    return answer
