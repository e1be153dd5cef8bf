"""Tests of ``make size``: code tokens, functions, and tours through the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import size
from tools.size_tours import Stop, Tour, TourError, TourSize, measure
from tools.sources import Source


def source(path: str, text: str) -> Source:
    return Source(Path(path), text)


def function(text: str) -> ast.FunctionDef:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return node


PLAN = source(
    "eplb_core/wire/plan.py",
    "class Plan:\n    epoch: int\n\n\ndef encode(plan: Plan) -> bytes:\n    return b''\n",
)
GROUP = source(
    "eplb_service/control/core/group.py",
    "class Group:\n    def offer(self, plan: Plan) -> None:\n        self.plan = plan\n",
)
OTHER = source("eplb_service/io/other.py", "def other() -> None: ...\n")
SOURCES = {module.path.as_posix(): module for module in (PLAN, GROUP, OTHER)}


def test_docstrings_comments_and_layout_are_not_code_tokens() -> None:
    code = source("eplb_core/figures.py", "LIMIT = 3\n")
    documented = source("eplb_core/figures.py", '"""Limits."""\n\n# A limit.\nLIMIT = 3\n"""The\nlimit."""\n')
    assert code.code_tokens == documented.code_tokens == 3


def test_an_f_string_is_one_token() -> None:
    assert source("eplb_core/figures.py", "TEXT = f'{1 + 2} of {total!r}'\n").code_tokens == 3


def test_a_room_is_two_folders_deep_and_three_below_control() -> None:
    assert (PLAN.room, GROUP.room) == ("eplb_core/wire", "eplb_service/control/core")


def test_room_figures_count_tokens_and_functions() -> None:
    many = ", ".join(f"value_{number}" for number in range(9))
    long = "".join(f"    step({number})\n" for number in range(50))
    module = source("eplb_core/wire/long.py", f"def long():\n{long}\n\ndef wide({many}): ...\n")
    figures = size.room_figures([PLAN, module])["eplb_core/wire"]
    assert figures[size.TOKENS] == PLAN.code_tokens + module.code_tokens
    assert (figures[size.LONG_FUNCTIONS], figures[size.WIDE_FUNCTIONS]) == (1, 1)
    assert figures[size.LARGE_MODULES] == 0


def test_a_docstring_does_not_lengthen_a_function() -> None:
    assert size.line_count(function('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')) == 2


def test_only_positional_parameters_other_than_self_are_counted() -> None:
    assert size.positional_parameters(function("def f(self, a, /, b, *rest, c, **others): ...")) == 2


def test_a_tour_counts_distinct_files_and_types() -> None:
    stops = (
        Stop("eplb_core/wire/plan.py", "Plan"),
        Stop("eplb_service/control/core/group.py", "Group.offer"),
        Stop("eplb_service/control/core/group.py", "Group.offer.plan"),
    )
    assert measure(Tour("a plan", ("Plan",), stops), SOURCES) == TourSize(2, 1)


def test_a_stop_may_be_a_whole_module() -> None:
    stops = (Stop("eplb_core/wire/plan.py", "Plan"), Stop("eplb_service/control/core/group.py"))
    assert measure(Tour("a plan", (), stops), SOURCES) == TourSize(2, 0)


@pytest.mark.parametrize(
    ("stops", "types", "message"),
    [
        ([("eplb_core/wire/plan.py", "Missing")], (), "does not define Missing"),
        ([("eplb_core/wire/missing.py", "Plan")], (), "does not exist"),
        (
            [("eplb_core/wire/plan.py", "Plan"), ("eplb_service/io/other.py", "other")],
            (),
            "does not connect eplb_core/wire/plan.py:Plan to eplb_service/io/other.py:other",
        ),
        ([("eplb_core/wire/plan.py", "Plan")], ("RankPlan",), "uses RankPlan"),
    ],
)
def test_a_tour_that_contradicts_the_code_is_an_error(stops, types, message) -> None:
    with pytest.raises(TourError, match=message):
        measure(Tour("a plan", types, tuple(Stop(*stop) for stop in stops)), SOURCES)
