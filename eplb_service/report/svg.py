"""Small SVG charts: lines over steps, scatter plots and heat maps, with axes, ticks and legends.

Text is kept as text elements. The same input produces the same file, byte for byte.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from eplb_core.placement import Float64

WIDTH = 920
_FONT = 13
_SMALL = 12
_CHARACTER = 7.0
"""Mean width of a character, in pixels."""
_LEGEND_COLUMNS = 3
_LEGEND_ROW = 20
_AXIS = "#b0aea9"
_GRID = "#eceae6"
_TEXT = "#222"
_MAX_TICKS = 7
_COOL_TO_WARM = np.array(
    [
        *((5, 48, 97), (33, 102, 172), (67, 147, 195), (146, 197, 222), (209, 229, 240), (247, 247, 247)),
        *((253, 219, 199), (244, 165, 130), (214, 96, 77), (178, 24, 43), (103, 0, 31)),
    ],
    dtype=np.float64,
)
"""Colours of ColorBrewer's RdBu, from blue to red."""
_NO_VALUE = 255
"""Value of all three colour channels for a missing value, which is drawn in white."""


class Look(NamedTuple):
    """Colour, dash pattern and marker of a line or a dot. An empty dash pattern is a solid line."""

    colour: str
    dashes: str = ""
    marker: str = "circle"


class Line(NamedTuple):
    """Line over steps: its name, its look, the first step of each value, and the values."""

    name: str
    look: Look
    steps: Sequence[int]
    values: Sequence[float]


class Dot(NamedTuple):
    """Named point of a scatter plot."""

    name: str
    look: Look
    x: float
    y: float


class Scale(NamedTuple):
    """Linear map from values to pixels."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """Return the pixel position of a value."""
        span = self.high - self.low or 1.0
        return self.first + (value - self.low) / span * (self.last - self.first)


def ticks(low: float, high: float, limit: int = _MAX_TICKS, whole: bool = False) -> list[float]:
    """Return round numbers between ``low`` and ``high``.

    Parameters
    ----------
    low
        Lower end of the axis.
    high
        Upper end of the axis.
    limit
        Approximate maximum number of ticks.
    whole
        True to return only whole numbers.

    Examples
    --------
    >>> ticks(0, 95, limit=5)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = max(high - low, 1e-9) / limit
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    step = max(1.0, step) if whole else step
    return [
        number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def marker_shape(marker: str, x: float, y: float, look: Look) -> str:
    """Draw a dot's marker."""
    if marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{look.colour}"/>'
    corners = _MARKERS[marker]
    points = " ".join(f"{x + 5 * across:.1f},{y + 5 * down:.1f}" for across, down in corners)
    return f'<polygon points="{points}" fill="{look.colour}"/>'


_MARKERS: Mapping[str, Sequence[tuple[float, float]]] = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "up": ((0, -1.1), (1.1, 0.9), (-1.1, 0.9)),
    "diamond": ((0, -1.3), (1.1, 0), (0, 1.3), (-1.1, 0)),
    "down": ((0, 1.1), (1.1, -0.9), (-1.1, -0.9)),
    "right": ((1.1, 0), (-0.9, 1.1), (-0.9, -1.1)),
}
MARKERS = ("circle", *_MARKERS)
"""Names of the markers."""


def lines_over_steps(title: str, x_title: str, lines: Sequence[Line], end: int) -> str:
    """Draw step lines: each value applies until the next one begins. The last value applies until step ``end``."""
    first = min((line.steps[0] for line in lines if line.steps), default=0)
    values = [value for line in lines for value in line.values if math.isfinite(value)]
    entries = [(line.name, line.look, False) for line in lines]
    drawing = _Chart(title, x_title, "", (first, max(end, first + 1)), _padded(values), entries)
    for line in lines:
        points: list[str] = []
        for begin, stop, value in zip(line.steps, [*line.steps[1:], end], line.values, strict=False):
            if math.isfinite(value):
                y = drawing.y(value)
                points += [f"{drawing.x(begin):.1f},{y:.1f}", f"{drawing.x(stop):.1f},{y:.1f}"]
        drawing.add(_polyline(points, line.look))
    return drawing.svg()


def dots_and_front(
    title: str, x_title: str, y_title: str, dots: Sequence[Dot], front: Sequence[tuple[float, float]]
) -> str:
    """Draw a scatter plot with a dotted line through the points of the front.

    Parameters
    ----------
    title
        Title of the chart.
    x_title
        Title of the horizontal axis.
    y_title
        Title of the vertical axis.
    dots
        Named points. ``x`` is a fraction that is shown as a percentage.
    front
        Points of the dotted line.

    Returns
    -------
    str
        The SVG file.
    """
    entries = [(dot.name, dot.look, True) for dot in dots]
    across = _padded([dot.x for dot in dots])
    drawing = _Chart(title, x_title, y_title, across, _padded([dot.y for dot in dots]), entries, _percent)
    drawing.add(
        _polyline([f"{drawing.x(x):.1f},{drawing.y(y):.1f}" for x, y in front], Look("#8a8d91", "2 3"))
    )
    for dot in dots:
        drawing.add(marker_shape(dot.look.marker, drawing.x(dot.x), drawing.y(dot.y), dot.look))
    return drawing.svg()


def heat_maps(title: str, x_title: str, y_title: str, maps: Mapping[str, Float64]) -> str:
    """Draw matrices side by side on a common scale: values below 1 in blue, values above 1 in red."""
    hottest = hottest_of(maps)
    rows = next(iter(maps.values())).shape[0]
    top = 58.0
    left = 60.0
    right = 90.0
    gap = 24.0
    height = min(460.0, max(120.0, 14.0 * rows))
    width = (WIDTH - left - right - gap * (len(maps) - 1)) / len(maps)
    elements = [_text(14, 22, title, size=15)]
    for number, (name, values) in enumerate(maps.items()):
        x = left + number * (width + gap)
        elements += [
            _text(x, top - 8, name),
            _image(values, hottest, x, top, width, height),
            _text(x + width / 2, top + height + 36, x_title, anchor="middle"),
        ]
        columns = values.shape[1]
        for tick in ticks(0, columns - 1, whole=True):
            tick_x = x + (tick + 0.5) / columns * width
            elements.append(_text(tick_x, top + height + 16, f"{tick:g}", _SMALL, "middle"))
    for tick in ticks(0, rows - 1, whole=True):
        tick_y = top + (tick + 0.5) / rows * height + 4
        elements.append(_text(left - 6, tick_y, f"{tick:g}", _SMALL, "end"))
    elements.append(_vertical_text(18, top + height / 2, y_title))
    elements += _colour_bar(hottest, WIDTH - right + 18, top, height)
    return _svg(title, top + height + 48, elements)


def hottest_of(maps: Mapping[str, Float64]) -> float:
    """Return the upper end of the maps' common scale."""
    return max(float(np.nanmax(values, initial=1.1)) for values in maps.values())


def scale_position(values: Float64, hottest: float) -> Float64:
    """Return the positions of values on the colour scale, from 0 to 1.

    The scale is linear from 0 to 1 in its lower half, and from 1 to ``hottest`` in its upper half.

    Examples
    --------
    >>> scale_position(np.array([0.5, 1.0, 3.0]), hottest=3.0).tolist()
    [0.25, 0.5, 1.0]
    """
    position: Float64 = np.where(values < 1, values / 2, 0.5 + (values - 1) / (2 * (hottest - 1)))
    return np.clip(position, 0.0, 1.0)


class _Chart:
    """Chart with a title, axes with ticks, horizontal grid lines, and a legend below the plot."""

    def __init__(
        self,
        title: str,
        x_title: str,
        y_title: str,
        across: tuple[float, float],
        up: tuple[float, float],
        entries: Sequence[tuple[str, Look, bool]],
        x_text: Callable[[float], str] = "{:,g}".format,
    ) -> None:
        self._title = title
        labels = {tick: f"{tick:.10g}" for tick in ticks(*up)}
        left = 24 + _CHARACTER * max(map(len, labels.values()), default=1) + (18 if y_title else 0)
        top = 40.0
        bottom = 300.0
        self.x = Scale(*across, left, WIDTH - 16)
        self.y = Scale(*up, bottom, top)
        self._elements = [_text(14, 22, title, size=15)]
        for tick, label in labels.items():
            y = self.y(tick)
            self._elements.append(f'<path d="M{left:.1f} {y:.1f}H{WIDTH - 16}" stroke="{_GRID}"/>')
            self._elements.append(_text(left - 6, y + 4, label, _SMALL, "end"))
        for tick in ticks(*across):
            x = self.x(tick)
            self._elements.append(f'<path d="M{x:.1f} {bottom}v4" stroke="{_AXIS}"/>')
            self._elements.append(_text(x, bottom + 18, x_text(tick), _SMALL, "middle"))
        frame = f"M{left:.1f} {top}V{bottom}H{WIDTH - 16}"
        self._elements.append(f'<path d="{frame}" fill="none" stroke="{_AXIS}"/>')
        self._elements.append(_text((left + WIDTH) / 2, bottom + 38, x_title, anchor="middle"))
        if y_title:
            self._elements.append(_vertical_text(18, (top + bottom) / 2, y_title))
        self._height = bottom + 56 + self._legend(entries, bottom + 62)

    def _legend(self, entries: Sequence[tuple[str, Look, bool]], top: float) -> float:
        """Add the names and looks of the entries, column by column, and return the height of the legend."""
        rows = -(-len(entries) // _LEGEND_COLUMNS)
        for number, (name, look, is_dot) in enumerate(entries):
            column, row = divmod(number, rows)
            x = 14 + column * (WIDTH - 28) / _LEGEND_COLUMNS
            y = top + row * _LEGEND_ROW
            ends = [f"{x:.1f},{y:.1f}", f"{x + 28:.1f},{y:.1f}"]
            self._elements.append(
                marker_shape(look.marker, x + 14, y, look) if is_dot else _polyline(ends, look)
            )
            self._elements.append(_text(x + 36, y + 4, name, _SMALL))
        return rows * _LEGEND_ROW

    def add(self, element: str) -> None:
        """Add an element on top of the others."""
        self._elements.append(element)

    def svg(self) -> str:
        """Return the SVG file."""
        return _svg(self._title, self._height, self._elements)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the values, extended by a margin."""
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    margin = 0.05 * (high - low) or 0.05 * (abs(high) or 1.0)
    return low - margin, high + margin


def _percent(value: float) -> str:
    return f"{100 * value:.10g}%"


def _svg(title: str, height: float, elements: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="{_FONT}" fill="{_TEXT}">'
    )
    body = "\n".join(elements)
    return f'{head}\n<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, size: int = _FONT, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _vertical_text(x: float, y: float, text: str) -> str:
    transform = f"translate({x:.1f} {y:.1f}) rotate(-90)"
    return f'<text transform="{transform}" text-anchor="middle">{escape(text)}</text>'


def _polyline(points: Sequence[str], look: Look) -> str:
    dashes = f' stroke-dasharray="{look.dashes}"' if look.dashes else ""
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{look.colour}" stroke-width="1.8"{dashes}/>'


def _image(values: Float64, hottest: float, x: float, y: float, width: float, height: float) -> str:
    """Draw a matrix as an image at about the resolution of the chart.

    Some viewers smooth an image when they enlarge it, so the matrix is enlarged here.
    """
    rows, columns = values.shape
    enlarged = values.repeat(max(1, round(height / rows)), axis=0).repeat(
        max(1, round(width / columns)), axis=1
    )
    data = base64.b64encode(_png(_colours(enlarged, hottest))).decode()
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )


def _colours(values: Float64, hottest: float) -> Float64:
    """Return the RGB colour of each value, ``[rows, columns, 3]`` from 0 to 255. Missing values are white."""
    is_value = np.isfinite(values)
    position = scale_position(np.where(is_value, values, 1.0), hottest) * (len(_COOL_TO_WARM) - 1)
    stops = np.arange(len(_COOL_TO_WARM))
    colours = np.stack(
        [np.interp(position, stops, _COOL_TO_WARM[:, channel]) for channel in range(3)], axis=-1
    )
    return np.where(is_value[..., None], colours, _NO_VALUE)


def _png(colours: Float64) -> bytes:
    """Return an RGB image as PNG (https://www.w3.org/TR/png-3/)."""
    rows, columns = colours.shape[:2]
    # The first byte of each row is its filter type; 0 means no filter.
    scanlines = np.zeros((rows, 1 + 3 * columns), dtype=np.uint8)
    scanlines[:, 1:] = np.rint(colours).reshape(rows, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    data = zlib.compress(scanlines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _colour_bar(hottest: float, x: float, top: float, height: float) -> list[str]:
    """Draw a heat map's colour scale, with the hottest value at the top."""
    values = np.linspace(hottest, 0.0, 256)[:, None]
    elements = [_image(values, hottest, x, top, 14, height)]
    scale = Scale(0.0, hottest, top + height, top)
    elements += [_text(x + 20, scale(tick) + 4, f"{tick:.1f}x", _SMALL) for tick in ticks(0.0, hottest, 5)]
    elements.append(_text(WIDTH - 6, top - 8, "over the mean", _SMALL, "end"))
    return elements
