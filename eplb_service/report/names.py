"""Where the names of dots go: beside them, within the chart, covering neither each other nor a dot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_RADIUS = 7.0
_CHARACTER = 6.8
"""Width of an average character of 12 pixels; a little more than most fonts take."""
_RISE, _FALL = 10.0, 3.0
_BESIDE = (
    *((10.0, 4.0, "start"), (-10.0, 4.0, "end"), (0.0, -12.0, "middle"), (0.0, 20.0, "middle")),
    *((8.0, -9.0, "start"), (8.0, 18.0, "start"), (-8.0, -9.0, "end"), (-8.0, 18.0, "end")),
)
"""Places by a dot in the order in which they are tried: the text's offset, and which part of it is there."""


class Dot(NamedTuple):
    """A dot in pixels, and its name."""

    name: str
    x: float
    y: float


class NamePlace(NamedTuple):
    """Where a text begins, has its middle or ends, as ``anchor`` says, and its base line."""

    x: float
    y: float
    anchor: str


class Box(NamedTuple):
    """A rectangle, downwards from ``top`` to ``bottom``."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether some point is in both."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def within(self, other: Box) -> bool:
        """Whether all of it is in ``other``."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.top <= self.top and self.bottom <= other.bottom


def name_places(dots: Sequence[Dot], room: Box) -> list[NamePlace | None]:
    """For each dot a place for its name; ``None`` where there is none left. Those that come first choose first."""
    taken = [Box(dot.x - _RADIUS, dot.y - _RADIUS, dot.x + _RADIUS, dot.y + _RADIUS) for dot in dots]
    places: list[NamePlace | None] = []
    for dot in dots:
        place = next((place for place in _by(dot) if _is_free(box_of(dot.name, place), taken, room)), None)
        if place is not None:
            taken.append(box_of(dot.name, place))
        places.append(place)
    return places


def box_of(name: str, place: NamePlace) -> Box:
    """What a name takes at its place."""
    width = _CHARACTER * len(name)
    left = place.x - {"start": 0.0, "middle": width / 2, "end": width}[place.anchor]
    return Box(left, place.y - _RISE, left + width, place.y + _FALL)


def _by(dot: Dot) -> Iterable[NamePlace]:
    return (NamePlace(dot.x + right, dot.y + down, anchor) for right, down, anchor in _BESIDE)


def _is_free(box: Box, taken: Iterable[Box], room: Box) -> bool:
    return box.within(room) and not any(box.meets(other) for other in taken)
