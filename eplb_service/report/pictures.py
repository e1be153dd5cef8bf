"""The charts of a replay as SVG files, for slides and papers: those of the report, each with its title and legend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from eplb_service.atomic_write import OutputError, write_atomically
from eplb_service.replay.result import Replay
from eplb_service.report.charts import Charts, Line, Point, theme_variables
from eplb_service.report.svg import element, text

NAMES = ("par.svg", "moves.svg", "pareto.svg", "ranks.svg", "layers.svg")
"""Files that ``write_pictures`` writes."""

_MARGIN, _HEADING, _ROW = 16.0, 44.0, 20.0
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_VARIABLE = re.compile(r"var\(--(\w+)\)")


class _Picture(str):
    """An SVG file's text, which a notebook shows as the picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def write_pictures(folder: Path, replay: Replay) -> None:
    """Write one SVG per chart into ``folder``, which is made where it is missing; raises ``OutputError``."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
    for name, picture in pictures_of(replay).items():
        write_atomically(folder / name, picture.encode())


def pictures_of(replay: Replay) -> dict[str, str]:
    """The charts of a replay by the names of their files, ``NAMES``."""
    return dict(zip(NAMES, map(_Picture, _drawn(replay)), strict=True))


def _drawn(replay: Replay) -> list[str]:
    charts = Charts(replay)
    bar = charts.colour_bar

    def pair(*names: str) -> list[str]:
        headings = [charts.maps[name][0] for name in names]
        return [
            charts.heat_map(name, heading, f"{heading}: layer")
            for name, heading in zip(names, headings, strict=True)
        ]

    return [
        _picture("Peak-to-average ratio of the steps served", [charts.par], charts.lines),
        _picture("Slots that receive weights at a decision", [charts.moves]),
        _picture("Balance against moves", [charts.pareto], charts.points),
        _picture("Tokens of each rank over the mean rank", pair("before", "after"), bar=bar),
        _picture("PAR of each layer", pair("alone", "balanced"), bar=bar),
    ]


def _picture(title: str, drawings: Sequence[str], named: Sequence[Line | Point] = (), bar: str = "") -> str:
    """Drawings side by side under a title, with the names of lines or dots, or the bar of colours below."""
    sizes = [_size(drawing) for drawing in drawings]
    width = sum(size[0] for size in sizes) + _MARGIN * (len(sizes) + 1)
    below = _HEADING + max(size[1] for size in sizes) + 8
    parts = [text(title, _MARGIN, 28, "heading")]
    left = _MARGIN
    for drawing, size in zip(drawings, sizes, strict=True):
        parts.append(_placed(drawing, left, _HEADING))
        left += size[0] + _MARGIN
    if bar:
        parts.append(_placed(bar, _MARGIN, below))
        below += _size(bar)[1]
    legend, rows = _legend(named, width, below)
    return _standing_alone(title, width, below + rows * _ROW + _MARGIN, "".join(parts) + legend)


def _legend(named: Sequence[Line | Point], width: float, top: float) -> tuple[str, int]:
    """Each line's dashes, or dot, and name, and how many rows they take."""
    across = max(1, int((width - 2 * _MARGIN) // 300))
    parts = []
    for number, one in enumerate(named):
        x, y = _MARGIN + number % across * 300, top + (number // across + 0.5) * _ROW
        if isinstance(one, Point):
            parts.append(element("circle", cx=x + 17, cy=y, r=6, class_=f"dot {one.colour}"))
        else:
            parts.append(element("path", d=f"M{x:.0f} {y:.0f}h34", class_=f"line {one.colour}"))
        parts.append(text(one.name, x + 42, y + 4, "name"))
    return "".join(parts), -(-len(named) // across)


def _standing_alone(title: str, width: float, height: float, content: str) -> str:
    """A file: its colours written out, as programs that know no variables want them."""
    css = files("eplb_service.report").joinpath("charts.css").read_text()
    light = css.partition("@media")[0] + theme_variables()[0]
    colours = dict(re.findall(r"--(\w+):\s*(#\w+)", light))
    rules = css[css.index("svg text {") :] + "svg text.heading { fill: var(--ink); font-size: 18px; }"
    body = f"<title>{escape(title)}</title><style>{rules}</style>"
    body += element("rect", width=width, height=height, fill="var(--ground)") + content
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="system-ui, sans-serif">'
    )
    return head + _VARIABLE.sub(lambda match: colours[match[1]], body) + "</svg>\n"


def _size(drawing: str) -> tuple[float, float]:
    found = _SIZE.search(drawing)
    assert found is not None
    return float(found[1]), float(found[2])


def _placed(drawing: str, x: float, y: float) -> str:
    """A drawing at a place within another, in its own size."""
    width, height = _size(drawing)
    place = f'<svg x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" '
    return place + drawing.removeprefix("<svg ")
