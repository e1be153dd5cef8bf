"""Answers as a server would give them, for what compares and scores."""

from __future__ import annotations

from benchmarks.vllm_serving.load import Answer, Request

REQUEST = Request(3, "data", "sql", "SELECT ", 4)


def answer_of(text: str, shift: float = 0.0, error: str | None = None) -> Answer:
    ids = list(text.encode())
    candidates = [{str(token): -0.5 + shift, "a": -1.0, "b": -2.0} for token in ids]
    return Answer(ids, candidates, [0.1 * (place + 1) for place in range(len(ids))], error)
