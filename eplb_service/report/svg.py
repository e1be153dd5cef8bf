"""Small SVG drawings by hand: elements, scales with round ticks, axes, and places for the names of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

_ROUND = 1e-9
"""Part of a step within which a value is at a tick."""
_RADIUS = 7.0
_CHARACTER = 6.8
"""Width of an average character of 12 pixels; a little more than most fonts take."""
_RISE, _FALL = 10.0, 3.0
_BESIDE = (
    *((10.0, 4.0, "start"), (-10.0, 4.0, "end"), (0.0, -12.0, "middle"), (0.0, 20.0, "middle")),
    *((8.0, -9.0, "start"), (8.0, 18.0, "start"), (-8.0, -9.0, "end"), (-8.0, 18.0, "end")),
)
"""Places by a dot in the order in which they are tried: the text's offset, and which part of it is there."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels, downwards."""
NamePlace = tuple[float, float, str]


def element(name: str, content: str = "", **attributes: object) -> str:
    """One SVG element; ``_`` in an attribute's name stands for ``-``, a trailing one for nothing (``class_``)."""
    given = (
        (key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None
    )
    written = "".join(f' {key}="{_value(value)}"' for key, value in given)
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(content: str, x: float, y: float, class_: str = "label", **attributes: object) -> str:
    """A line of text."""
    return element("text", escape(content), x=x, y=y, class_=class_, **attributes)


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` onto pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the scale, about so many."""
        if self.high <= self.low:
            return [self.low]
        step = self._tick(about)
        first = math.ceil(self.low / step - _ROUND)
        last = math.floor(self.high / step + _ROUND)
        return [round(number * step, 10) for number in range(first, last + 1)]

    def whole(self, about: int = 5) -> Scale:
        """The scale widened until both of its ends are ticks."""
        scale, widened = self, None
        # A wider scale may have fewer, wider steps.
        while widened != scale and scale.high > scale.low:
            step = scale._tick(about)
            low = round(math.floor(scale.low / step + _ROUND) * step, 10)
            high = round(math.ceil(scale.high / step - _ROUND) * step, 10)
            scale, widened = replace(scale, low=low, high=high), scale
        return scale

    def _tick(self, about: int) -> float:
        """A round step of which about so many fit the scale."""
        raw = (self.high - self.low) / about
        base = 10.0 ** math.floor(math.log10(raw))
        return next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)


def frame(x: Scale, y: Scale, x_title: str, y_title: str, *, percent: bool = False) -> str:
    """Grid, ticks and titles of the axes ``x``, to the right, and ``y``, upwards.

    ``x_title`` and ``y_title`` say what they show; with ``percent`` values along ``x`` are parts of 1.
    """
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(element("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        parts.append(text(_plain(value), x.start - 8, at + 4, "tick", text_anchor="end"))
    for value in x.ticks(6):
        label = f"{value:.0%}" if percent else _plain(value)
        parts.append(text(label, x(value), y.start + 18, "tick", text_anchor="middle"))
    parts.append(element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    parts.append(text(x_title, (x.start + x.end) / 2, y.start + 38, "title", text_anchor="middle"))
    parts.append(text(y_title, x.start, y.end - 12, "title"))
    return "".join(parts)


def steps_path(xs: Sequence[float], ys: Sequence[float], last: float) -> str:
    """A path that holds each ``ys`` from its ``xs`` to the next one, the last until ``last``."""
    path = f"M{_value(xs[0])} {_value(ys[0])}"
    for right, height in zip([*xs[1:], last], [*ys[1:], ys[-1]], strict=True):
        path += f"H{_value(right)}V{_value(height)}"
    return path


def _plain(value: float) -> str:
    """A tick's number, without zeros that say nothing."""
    return f"{value:,.10g}" if value >= 1000 else f"{value:.10g}"


def drawing(name: str, caption: str, width: float, height: float, content: str) -> str:
    """A whole SVG that scales with the page: ``content``, drawn in coordinates of ``width`` and ``height``.

    ``name`` is its id, ``caption`` what it shows, for those who cannot see it.
    """
    box = f"0 0 {_value(width)} {_value(height)}"
    return element("svg", content, id=name, class_="chart", viewBox=box, role="img", aria_label=caption)


def name_places(dots: Sequence[tuple[str, float, float]], room: Box) -> list[NamePlace | None]:
    """A place for each dot's name, which covers neither a dot nor another name; ``None`` where none is left.

    Parameters
    ----------
    dots
        Each one's name and pixel; those that come first choose first.
    room
        The chart, which no name leaves.

    Returns
    -------
    list
        The text's ``x`` and base line, and its anchor, ``start``, ``middle`` or ``end``.
    """
    taken = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for _, x, y in dots]
    places: list[NamePlace | None] = []
    for name, x, y in dots:
        beside = ((x + right, y + down, anchor) for right, down, anchor in _BESIDE)
        place = next((place for place in beside if _is_free(name_box(name, place), taken, room)), None)
        if place is not None:
            taken.append(name_box(name, place))
        places.append(place)
    return places


def name_box(name: str, place: NamePlace) -> Box:
    """The rectangle of a name at its place."""
    x, y, anchor = place
    width = _CHARACTER * len(name)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - _RISE, left + width, y + _FALL


def _is_free(box: Box, taken: Sequence[Box], room: Box) -> bool:
    left, top, right, bottom = box
    inside = room[0] <= left and right <= room[2] and room[1] <= top and bottom <= room[3]
    return inside and not any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in taken
    )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value), quote=True)
