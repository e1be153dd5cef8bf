"""Tests of ``make idiom``, which counts odd constructions, parallel assignments and vague names, but not clean text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import idiom
from tools.sources import Source

PAGE = Path("docs/page.md")

EXAMPLES = [
    ("Raise an error where the rank is idle.", "'where' instead of 'if'"),
    ("Nobody waits for the decision.", "indefinite person or thing"),
    ("All layers but for the dense ones switch.", "'but' instead of 'except' or 'unless'"),
    ("The rank by which the vote is lost.", "preposition before a relative pronoun"),
    ("A plan is to be sent.", "'is to be'"),
    ("Send the plan to so many ranks.", "'so many', 'as much', 'likewise' or 'alike'"),
    ("Its tables are those of the plan.", "'those of' or 'that of'"),
    ("Return what is served.", "'what' as a noun clause"),
    ("Return the plan, if any.", "'none' as a pronoun"),
    ("Use the first layer alone.", "'alone' instead of 'only'"),
    ("Each rank has a thread of its own.", "rare verb or reflexive"),
    ("Whether the rank has switched.", idiom.OPENING),
]


def module(text: str) -> idiom.Room:
    room = idiom.Room()
    source = Source(Path("eplb_core/module.py"), text)
    for line, prose in source.prose():
        idiom.add_prose(room, source.path, line, prose)
    idiom.add_code(room, source)
    return room


@pytest.mark.parametrize(("text", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_each_construction_is_counted_once(text: str, name: str) -> None:
    assert [found_name for _, found_name in idiom.odd_constructions(text)] == [name]


def test_each_construction_has_an_example() -> None:
    assert {name for _, name in EXAMPLES} == {*idiom.CONSTRUCTIONS, idiom.OPENING}


@pytest.mark.parametrize(
    "text",
    [
        "Return the mean load per rank.",
        "The service rejects plans from an older term, but the model keeps serving.",
        "If the rank is idle, it votes to keep the current placement.",
        "Return None unless all ranks have reported the step.",
    ],
)
def test_clean_text_is_not_counted(text: str) -> None:
    assert idiom.odd_constructions(text) == []


def test_docstrings_and_comments_are_prose_and_keep_their_line_numbers() -> None:
    room = module('"""Clean."""\n\n# The first\n# layer alone.\nLIMIT = "what is"\n"""Nobody waits."""\n')
    assert room.words == 7
    assert [(occurrence.line, occurrence.text) for occurrence in sorted(room.odd)] == [
        (4, "'alone' instead of 'only'"),
        (6, "indefinite person or thing"),
    ]


def test_code_blocks_on_pages_are_not_prose() -> None:
    room = idiom.Room()
    idiom.add_prose(room, PAGE, 1, idiom.without_code("# Plans\n\n```\nNobody waits.\n```\nNobody waits.\n"))
    assert [occurrence.line for occurrence in room.odd] == [6]


@pytest.mark.parametrize(
    ("statement", "parallel"),
    [
        ("ranks, slots = 4, 2", True),
        ("self.rank, self.slot = rank, slot", True),
        ("first, second = second, first", False),
        ("older, newer = newer, older + newer", False),
        ("heat, times = window.arrays()", False),
    ],
)
def test_only_unrelated_values_make_a_parallel_assignment(statement: str, parallel: bool) -> None:
    (node,) = ast.parse(statement).body
    assert isinstance(node, ast.Assign)
    assert idiom.is_parallel(node) is parallel


def test_participles_and_pronouns_are_vague_names() -> None:
    room = module("def f(given, rank, *, ours):\n    found = rank\n    found_rank = given\n")
    assert room.names == 5
    assert [occurrence.text for occurrence in room.vague] == ["vague name: given", "vague name: found"]


def test_a_rate_above_the_ceiling_is_reported() -> None:
    clean = idiom.Room(words=1000)
    odd = idiom.Room(words=1000, odd=[idiom.Place(PAGE, 1, "odd")] * 5)
    assert idiom.rates_above({"docs": clean, "eplb_core/new": clean}) == []
    assert idiom.rates_above({"eplb_core/new": odd}) == [
        "eplb_core/new has 5.0 odd constructions per 1,000 words, above its ceiling of 4"
    ]


def test_one_occurrence_in_a_small_room_is_not_a_high_rate() -> None:
    small = idiom.Room(words=50, odd=[idiom.Place(PAGE, 1, "odd")])
    assert idiom.GAUGES[0].rate(small) == 2.0
