"""Answers of two runs are compared by request, and errors for invalid files name the file and the problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eplb_service.replay.answers import Answers, AnswersError, compare_answers


def compared(folder: Path, first: Any, second: Any) -> Answers:
    paths = folder / "a.json", folder / "b.json"
    for path, content in zip(paths, (first, second), strict=True):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return compare_answers(*paths)


def test_answers_in_lists_and_in_objects_are_compared(tmp_path: Path) -> None:
    assert str(compared(tmp_path, [[1, 2], [3]], [[1, 2], [3]])) == "2 of 2 answers equal (3 tokens compared)"
    assert compared(tmp_path, {"a": [1], "b": [2]}, {"b": [2], "c": [4]}) == Answers(1, 1, 1, 2, "")
    assert compared(tmp_path, {"1": [5]}, [[4], [5]]).equal == 1


@pytest.mark.parametrize(
    ("second", "token"), [([1, 2, 4], 2), ([1, 2], 2), ([0, 2, 3], 0), ([1, 2, 3, 4], 3)]
)
def test_the_first_difference_is_reported_by_request_and_token(
    tmp_path: Path, second: list[int], token: int
) -> None:
    result = compared(tmp_path, {"x": [1], "y": [1, 2, 3]}, {"x": [1], "y": second})
    assert result == Answers(2, 1, 4, 0, f"request y, token {token}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "a.json: cannot be read .not JSON"),
        ("[" * 100_000, "a.json: cannot be read .not JSON"),
        ("7", "is a single int; expected lists"),
        ([[1, "2"]], "request 0 has no list of integer token ids"),
        ([[1, 2.0]], "request 0 has no list of integer token ids"),
        ([[True]], "request 0 has no list of integer token ids"),
        ({"r": "text"}, "request r has no list of integer token ids"),
        ({"other": [1]}, "have no request in common"),
    ],
)
def test_invalid_files_are_reported(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(AnswersError, match=problem):
        compared(tmp_path, content, {"b": [1]})


def test_an_absent_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AnswersError, match=r"a\.json: cannot be read .No such file"):
        compare_answers(tmp_path / "a.json", tmp_path / "b.json")
