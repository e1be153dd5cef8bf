"""Names beside dots cover neither each other nor a dot, and stay within the chart; what has no room is left out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eplb_service.report.svg import Box, name_box, name_places

ROOM = (50.0, 20.0, 900.0, 320.0)
DOTS = st.lists(
    st.tuples(st.text("abc -,", min_size=1, max_size=30), st.floats(50, 900), st.floats(20, 320)),
    max_size=40,
)


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@given(DOTS)
def test_names_cover_nothing(dots: list[tuple[str, float, float]]) -> None:
    placed = zip(dots, name_places(dots, ROOM), strict=True)
    boxes = [name_box(dot[0], place) for dot, place in placed if place is not None]
    assert all(box[0] >= ROOM[0] and box[2] <= ROOM[2] for box in boxes)
    assert all(box[1] >= ROOM[1] and box[3] <= ROOM[3] for box in boxes)
    assert not any(meet(one, other) for one, other in itertools.combinations(boxes, 2))
    for box, (_, x, y) in itertools.product(boxes, dots):
        assert not meet(box, (x - 6, y - 6, x + 6, y + 6))


def test_a_name_is_to_the_right_where_there_is_room_and_else_somewhere_beside() -> None:
    alone, at_the_edge = ("flashlb", 200.0, 100.0), ("flashlb", 890.0, 100.0)
    assert name_places([alone, at_the_edge], ROOM) == [(210, 104, "start"), (880, 104, "end")]


def test_the_first_of_too_many_get_their_names() -> None:
    crowd = [(f"policy {number:02}", 300.0, 100 + number / 10) for number in range(40)]
    places = name_places(crowd, ROOM)
    assert places[0] is not None
    assert sum(place is None for place in places) > 20
