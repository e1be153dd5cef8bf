"""Comparison of a model's answers in two runs: token ids by request.

A file of answers is JSON: an object with a list of token ids for each request, or a list of such lists in the order of
the requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class AnswersError(ValueError):
    """Raised if answers cannot be compared. The error message names the file, the problem and the remedy."""


@dataclass(frozen=True)
class Answers:
    """Comparison of two runs.

    Parameters
    ----------
    requests
        Number of requests that both runs answered.
    equal
        Number of these requests whose token ids are all equal.
    tokens
        Number of token ids in the first run's answers to these requests.
    only_in_one
        Number of requests that only one run answered.
    difference
        Request and position of the first difference; empty if all answers are equal.
    """

    requests: int
    equal: int
    tokens: int
    only_in_one: int
    difference: str

    def __str__(self) -> str:
        text = f"{self.equal:,} of {self.requests:,} answers equal ({self.tokens:,} tokens compared)"
        if self.difference:
            text += f"; first difference: {self.difference}"
        if self.only_in_one:
            text += f"; {self.only_in_one:,} requests were answered in only one of the files"
        return text


def compare_answers(first: Path, second: Path) -> Answers:
    """Compare the answers in two files, request by request.

    Raises ``AnswersError`` if a file is not valid, or if the files have no request in common.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.json").write_text('{"r1": [5, 6], "r2": [7, 8]}')
    >>> _ = (folder / "b.json").write_text('{"r1": [5, 6], "r2": [7, 9]}')
    >>> print(compare_answers(folder / "a.json", folder / "b.json"))
    1 of 2 answers equal (4 tokens compared); first difference: request r2, token 1
    """
    a, b = _read(first), _read(second)
    common = [request for request in a if request in b]
    if not common:
        raise AnswersError(
            f"{first} and {second} have no request in common; record both with the same requests"
        )
    differing = [request for request in common if a[request] != b[request]]
    return Answers(
        requests=len(common),
        equal=len(common) - len(differing),
        tokens=sum(len(a[request]) for request in common),
        only_in_one=len(a.keys() ^ b.keys()),
        difference=_first_difference(differing[0], a, b) if differing else "",
    )


def _first_difference(request: str, a: dict[str, list[int]], b: dict[str, list[int]]) -> str:
    pairs = zip(a[request], b[request], strict=False)
    same = min(len(a[request]), len(b[request]))
    token = next((number for number, (left, right) in enumerate(pairs) if left != right), same)
    return f"request {request}, token {token}"


def _read(path: Path) -> dict[str, list[int]]:
    """Return the token ids in a file, keyed by request. Raises ``AnswersError`` if the file is not valid."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise AnswersError(f"{path}: cannot be read ({reason})") from error
    if isinstance(content, list):
        content = {str(number): ids for number, ids in enumerate(content)}
    if not isinstance(content, dict):
        raise AnswersError(
            f"{path}: is a single {type(content).__name__}; expected lists of token ids by request"
        )
    for request, ids in content.items():
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise AnswersError(f"{path}: request {request} has no list of integer token ids")
    return content
