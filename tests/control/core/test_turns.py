"""Turns are given in the order of asking, for no more than there is room for, and never none where somebody waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eplb_service.control.core.turns import Turns


def test_turns_are_given_in_order_as_others_end() -> None:
    turns = Turns[str](10)
    assert turns.ask("a", 6) == ["a"]
    assert turns.ask("b", 6) == []
    assert turns.ask("c", 2) == [], "it does not overtake b"
    assert turns.over("a") == ["b", "c"]
    assert turns.held == 8
    assert turns.over("a") == []
    assert turns.over("b") == turns.over("c") == []
    assert turns.held == 0


def test_what_is_larger_than_the_room_goes_alone() -> None:
    turns = Turns[str](10)
    assert turns.ask("a", 1) == ["a"]
    assert turns.ask("large", 50) == []
    assert turns.ask("b", 1) == []
    assert turns.over("a") == ["large"]
    assert turns.over("large") == ["b"]


def test_who_no_longer_waits_holds_nobody_up() -> None:
    turns = Turns[str](10)
    turns.ask("a", 10)
    turns.ask("gone", 10)
    turns.ask("b", 10)
    assert turns.over("gone") == []
    assert turns.over("a") == ["b"]


@given(st.data())
def test_whatever_happens_all_get_their_turn_and_the_room_is_kept(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 20))
    turns, sizes = Turns[int](most), data.draw(st.lists(st.integers(0, 30), max_size=12))
    begun: list[int] = []
    sending: set[int] = set()
    asked = 0
    while asked < len(sizes) or sending:
        if asked < len(sizes) and data.draw(st.booleans()):
            new = turns.ask(asked, sizes[asked])
            asked += 1
        elif sending:
            ended = data.draw(st.sampled_from(sorted(sending)))
            sending.discard(ended)
            new = turns.over(ended)
        else:
            continue
        begun += new
        sending |= set(new)
        assert turns.held == sum(sizes[who] for who in sending)
        assert turns.held <= most or len(sending) == 1
        assert sending or len(begun) == asked, "nobody waits while nobody sends"
    assert begun == list(range(len(sizes)))
    assert turns.held == 0
