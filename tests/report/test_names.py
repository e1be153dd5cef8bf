"""Names beside dots cover neither each other nor a dot, and stay within the chart; what has no room is left out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eplb_service.report.names import Box, Dot, NamePlace, box_of, name_places

ROOM = Box(50, 20, 900, 320)
DOTS = st.lists(
    st.builds(Dot, st.text("abc -,", min_size=1, max_size=30), st.floats(50, 900), st.floats(20, 320)),
    max_size=40,
)


@given(DOTS)
def test_names_cover_nothing(dots: list[Dot]) -> None:
    placed = zip(dots, name_places(dots, ROOM), strict=True)
    boxes = [box_of(dot.name, place) for dot, place in placed if place is not None]
    assert all(box.within(ROOM) for box in boxes)
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
    for box, dot in itertools.product(boxes, dots):
        assert not box.meets(Box(dot.x - 6, dot.y - 6, dot.x + 6, dot.y + 6))


def test_a_name_is_to_the_right_where_there_is_room_and_else_somewhere_beside() -> None:
    alone, at_the_edge = Dot("flashlb", 200, 100), Dot("flashlb", 890, 100)
    assert name_places([alone, at_the_edge], ROOM) == [
        NamePlace(210, 104, "start"),
        NamePlace(880, 104, "end"),
    ]


def test_the_first_of_too_many_get_their_names() -> None:
    crowd = [Dot(f"policy {number:02}", 300, 100 + number / 10) for number in range(40)]
    places = name_places(crowd, ROOM)
    assert places[0] is not None
    assert sum(place is None for place in places) > 20
