"""The charts of a replay as SVG, and the figures that they show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from eplb_service.placement import Float64, mean_par
from eplb_service.replay.result import PolicyReplay, Replay
from eplb_service.report.svg import Scale, drawing, element, frame, name_places, steps_path, text

_WIDTH = 960.0
_LEFT, _RIGHT = 56.0, 16.0
_HOTTEST = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
"""Loads over mean at which the colours of heat maps may end."""
_BINS = 12
_COLOURS = 8
_DASHES = 6
"""Patterns of ``report.css`` that distinguish lines of the same colour."""
_MOST_MAPPED = 64
"""Decisions that a map over time shows; more are averaged."""


class Line(NamedTuple):
    """A line over steps: its name, its colour's class, where each value begins, and the values."""

    name: str
    colour: str
    steps: Sequence[int]
    values: Sequence[float]


class Point(NamedTuple):
    """A policy among others: its name, its colour's class, moves per decision as a share of all slots, and PAR."""

    name: str
    colour: str
    moves: float
    par: float


class Charts:
    """The charts of one replay; all heat maps share a scale on which no value lies outside.

    ``par``, ``moves``, ``pareto`` and ``colour_bar`` are pictures. ``best`` is the policy of least realised PAR,
    ``lines`` PAR along the trace, ``points`` PAR against moves. ``maps`` has each heat map's heading, what its columns
    are, and its values by layer.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.colours = colours_of(replay)
        self.best = min(replay.policies, key=lambda policy: policy.par_realised)
        self.span = replay.first, replay.first + replay.steps
        self.lines = self._par_lines()
        acting = [policy for policy in replay.policies if policy.policy != "none"]
        # Doing nothing is shown only where there is hardly anything else to see.
        self.points = [
            Point(policy.label, self.colours[policy.label], self.moved_share(policy), policy.par_realised)
            for policy in (acting if len(acting) > 1 else replay.policies)
        ]
        move_lines = [
            Line(
                policy.label,
                self.colours[policy.label],
                [decision.step for decision in policy.decisions],
                [decision.moves for decision in policy.decisions],
            )
            for policy in acting or replay.policies
        ]
        baseline = replay.baseline(self.best.setup)
        balanced_DL = np.stack([decision.par_realised_L for decision in self.best.decisions])
        self.maps = {
            "before": ("Left alone", "rank", _over_mean(baseline.loads_LR)),
            "after": (self.best.label, "rank", _over_mean(self.best.loads_LR)),
            "alone": ("Left alone", "decision", _drawn(_few_columns(baseline.par_DL.T))),
            "balanced": (self.best.label, "decision", _drawn(_few_columns(balanced_DL.T))),
        }
        self._hottest = _hottest_of(*(values for _, _, values in self.maps.values()))
        self.par = _par_over_time(self.lines, self.span[1])
        self.moves = _moves_per_decision(move_lines, self.span[1])
        self.pareto = _pareto(self.points)
        self.colour_bar = _colour_bar(self._hottest)

    def heat_map(self, name: str, caption: str, y_title: str) -> str:
        """One of ``maps``."""
        _, column, values = self.maps[name]
        return _heat_map(name, caption, values, y_title, column, self._hottest)

    def moved_share(self, policy: PolicyReplay) -> float:
        """Slots that receive weights at a decision, as a share of all slots."""
        return policy.moves_per_decision / (self._replay.layers * self._replay.ranks * policy.setup.slots)

    def _par_lines(self) -> list[Line]:
        """Realised PAR of each policy along the trace, after what it is measured against."""
        replay, lines = self._replay, []
        for baseline in replay.baselines:
            same = [policy for policy in replay.policies if policy.setup == baseline.setup]
            steps = [decision.step for decision in same[0].decisions]
            also = "" if len(replay.baselines) == 1 else same[0].label.removeprefix(same[0].policy)
            measured = {"floor": ("floor", baseline.floor_DL)}
            hindsight_DL = replay.hindsight_DL(baseline.setup)
            if hindsight_DL is not None:
                measured["hindsight"] = ("hindsight", hindsight_DL)
            if not any(policy.policy == "none" for policy in same):
                measured["left alone"] = ("none", baseline.par_DL)
            for name, (colour, par_DL) in measured.items():
                values = _drawn(mean_par(par_DL, axis=1)).tolist()
                lines.append(Line(f"{name}{also}", colour, steps, values))
        for policy in replay.policies:
            steps = [decision.step for decision in policy.decisions]
            values = _drawn(np.array([decision.par_realised for decision in policy.decisions])).tolist()
            lines.append(Line(policy.label, self.colours[policy.label], steps, values))
        return lines


def colours_of(replay: Replay) -> dict[str, str]:
    """The classes of each policy's colour and dashes, by its label; doing nothing is grey.

    Up to ``_COLOURS * _DASHES`` policies look different from each other.
    """
    acting = [policy.label for policy in replay.policies if policy.policy != "none"]
    colours = {policy.label: "none" for policy in replay.policies}
    return colours | {
        label: f"s{number % _COLOURS} d{number // _COLOURS % _DASHES}" for number, label in enumerate(acting)
    }


def _par_over_time(lines: Sequence[Line], end: int) -> str:
    """Realised PAR along the trace, a line per policy, held from each decision to the next."""
    height, top, bottom = 360.0, 34.0, 300.0
    values = np.concatenate([line.values for line in lines])
    low, high = min(1.0, float(values.min())), float(np.max(values))
    x = Scale(min(line.steps[0] for line in lines), end, _LEFT, _WIDTH - _RIGHT)
    y = Scale(low, max(high, low + 0.05), bottom, top).whole()
    parts = [frame(x, y, "step", "PAR, mean over layers")]
    for line in lines:
        path = steps_path([x(step) for step in line.steps], [y(value) for value in line.values], x(end))
        parts.append(element("path", d=path, class_=f"line {line.colour}", data_series=line.name))
    parts.append(element("line", class_="cross", x1=0, x2=0, y1=top, y2=bottom))
    return drawing(
        "par",
        "Realised peak-to-average ratio over steps, one line per policy",
        _WIDTH,
        height,
        "".join(parts),
    )


def _moves_per_decision(lines: Sequence[Line], end: int) -> str:
    """Slots that had to receive weights at each decision, a row of bars per policy, all on one scale."""
    row, top = 74.0, 4.0
    most = max(1.0, *(float(np.max(line.values)) for line in lines))
    x = Scale(min(line.steps[0] for line in lines), end, _LEFT, _WIDTH - _RIGHT)
    parts = []
    for number, line in enumerate(lines):
        floor = top + (number + 1) * row - 8
        y = Scale(0, most, floor, floor - row + 32)
        for begin, stop, value in zip(line.steps, [*line.steps[1:], end], line.values, strict=True):
            left, width = x(begin), max(1.0, x(stop) - x(begin) - 1)
            up, colour = y(value), f"bar {line.colour}"
            parts.append(element("rect", x=left, y=up, width=width, height=floor - up, class_=colour))
        parts.append(element("line", x1=x.start, x2=x.end, y1=floor, y2=floor, class_="axis"))
        parts.append(text(line.name, x.start + 4, floor - row + 22, "name"))
        parts.append(text(f"{most:,.0f}", x.start - 8, floor - row + 36, "tick", text_anchor="end"))
        parts.append(text("0", x.start - 8, floor + 4, "tick", text_anchor="end"))
    height = top + len(lines) * row
    parts += [text(f"{tick:,.0f}", x(tick), height + 12, "tick", text_anchor="middle") for tick in x.ticks(6)]
    parts.append(text("step", (x.start + x.end) / 2, height + 32, "title", text_anchor="middle"))
    caption = "Experts received at each decision, one row of bars per policy"
    return drawing("moves", caption, _WIDTH, height + 40, "".join(parts))


def _pareto(points: Sequence[Point]) -> str:
    """PAR against moves: what each policy pays for its balance, and the front that none beats in both."""
    height, top, bottom = 380.0, 34.0, 320.0
    pars = [point.par for point in points]
    most = min(1.0, max(0.02, 1.15 * max(point.moves for point in points)))
    x = Scale(0, most, _LEFT, _WIDTH - _RIGHT).whole(6)
    margin = max(0.08 * (max(pars) - min(pars)), 0.025 - 0.5 * (max(pars) - min(pars)), 0.01)
    y = Scale(min(pars) - margin, max(pars) + margin, bottom, top).whole()
    parts = [frame(x, y, "slots that receive weights at a decision", "PAR", percent=True)]
    best = _front(points)
    if len(best) > 1:
        path = "M" + "L".join(f"{x(point.moves):.1f} {y(point.par):.1f}" for point in best)
        parts.append(element("path", d=path, class_="front"))
    ordered = [*best, *sorted((point for point in points if point not in best), key=lambda point: point.par)]
    dots = [(point.name, x(point.moves), y(point.par)) for point in ordered]
    places = name_places(dots, (_LEFT, top - 8, _WIDTH, bottom))
    for point, (_, at, up), place in zip(ordered, dots, places, strict=True):
        tip = element("title", escape(f"{point.name}: PAR {point.par:.3f}, {point.moves:.1%} of the slots"))
        circle = {"cx": at, "cy": up, "r": 6, "class_": f"dot {point.colour}", "data_series": point.name}
        parts.append(element("circle", tip, **circle))
        if place is not None:
            left, base, anchor = place
            parts.append(text(point.name, left, base, "name", text_anchor=anchor, data_series=point.name))
    return drawing("pareto", "Realised PAR against moves, one dot per policy", _WIDTH, height, "".join(parts))


def _hottest_of(*ratios_YX: Float64) -> float:
    """Where the colours of maps end, so that all of them share a scale on which no value lies outside."""
    most = max((float(ratio_YX.max()) for ratio_YX in ratios_YX if ratio_YX.size), default=1.0)
    return next((end for end in _HOTTEST if most <= end), most)


def _heat_map(name: str, caption: str, ratio_YX: Float64, y_title: str, x_title: str, hottest: float) -> str:
    """Draw values around 1, rows downwards: cool below it, warm above, warmest at ``hottest``."""
    rows, columns = ratio_YX.shape
    width, left, top = 468.0, 44.0, 22.0
    cell_width = (width - left - 6) / columns
    cell_height = min(26.0, max(4.0, 340.0 / rows))
    scaled_YX = np.where(ratio_YX < 1, ratio_YX - 1, (ratio_YX - 1) / (hottest - 1))
    bins_YX = np.clip(np.round(scaled_YX * _BINS), -_BINS, _BINS).astype(int)
    paths: dict[int, list[str]] = {}
    for row, bins_X in enumerate(bins_YX):
        edges = [0, *(np.flatnonzero(np.diff(bins_X)) + 1).tolist(), columns]
        upper, lower = top + row * cell_height, top + (row + 1) * cell_height
        for begin, stop in itertools.pairwise(edges):
            box = (left + begin * cell_width, upper, left + stop * cell_width, lower)
            paths.setdefault(int(bins_X[begin]), []).append(
                "M{0:.2f} {1:.2f}H{2:.2f}V{3:.2f}H{0:.2f}z".format(*box)
            )
    cells = "".join(
        element("path", d="".join(boxes), fill=f"var(--h{'c' if bin_ < 0 else 'w'}{abs(bin_)})")
        for bin_, boxes in sorted(paths.items())
    )
    bottom = top + rows * cell_height
    parts = [element("g", cells, class_="cells", shape_rendering="crispEdges")]
    for row in _spread(rows, 8):
        at = top + (row + 0.5) * cell_height + 4
        parts.append(text(str(row), left - 6, at, "tick", text_anchor="end"))
    for column in _spread(columns, 8):
        at = left + (column + 0.5) * cell_width
        parts.append(text(str(column), at, bottom + 14, "tick", text_anchor="middle"))
    parts.append(text(y_title, left, 12, "title"))
    parts.append(text(x_title, (left + width) / 2, bottom + 32, "title", text_anchor="middle"))
    return drawing(name, caption, width, bottom + 38, "".join(parts))


def _colour_bar(hottest: float) -> str:
    """Legend of the heat maps' colours."""
    cell = 12.0
    parts = []
    for number, bin_ in enumerate(range(-_BINS, _BINS + 1)):
        fill = f"var(--h{'c' if bin_ < 0 else 'w'}{abs(bin_)})"
        parts.append(element("rect", x=10 + number * cell, y=2, width=cell + 0.5, height=10, fill=fill))
    for bin_, value in zip((0, 6, 12, 18, 24), (0.0, 0.5, 1.0, (1 + hottest) / 2, hottest), strict=True):
        at = 10 + (bin_ + 0.5) * cell
        parts.append(text(f"{value:g}x", at, 26, "tick", text_anchor="middle"))
    parts.append(text("over the mean rank", 12 + 25 * cell + 14, 13, "tick"))
    return drawing(
        "colours", f"Colours from no tokens to {hottest:g} times the mean", 500, 32, "".join(parts)
    )


def theme_variables() -> tuple[str, str]:
    """CSS variables of the heat maps' colours, on light and on dark ground: neutral at 1, stronger away from it."""
    cool, warm = (36, 99, 190), (208, 62, 20)
    cool_dark, warm_dark = (86, 156, 255), (255, 120, 60)
    return _ramp((242, 241, 238), cool, warm), _ramp((44, 46, 50), cool_dark, warm_dark)


def _ramp(middle: tuple[int, int, int], cool: tuple[int, int, int], warm: tuple[int, int, int]) -> str:
    rules = []
    for letter, far in (("c", cool), ("w", warm)):
        for bin_ in range(_BINS + 1):
            share = (bin_ / _BINS) ** 0.9
            mixed = [round(near + share * (end - near)) for near, end in zip(middle, far, strict=True)]
            rules.append(f"--h{letter}{bin_}:#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}")
    return ";".join(rules)


def _front(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both PAR and moves, by moves."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.moves, point.par)):
        if not best or point.par < best[-1].par:
            best.append(point)
    return best


def _spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to ``count`` - 1 in round steps, at most about ``most``."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, count) if count / step <= most)
    return list(range(0, count, step))


def _drawn(par: Float64) -> Float64:
    """Ratios as pictures show them: where nothing was served there is none, and nothing sticks out at 1."""
    return np.nan_to_num(par, nan=1.0)


def _over_mean(loads_LR: Float64) -> Float64:
    """Tokens of each rank over its layer's mean rank, float64 ``[L, R]``."""
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    ratio_LR: Float64 = loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)
    return ratio_LR


def _few_columns(values_LD: Float64) -> Float64:
    """The same with at most ``_MOST_MAPPED`` columns, each the mean of neighbours."""
    if values_LD.shape[1] <= _MOST_MAPPED:
        return values_LD
    return np.stack(
        [mean_par(part, axis=1) for part in np.array_split(values_LD, _MOST_MAPPED, axis=1)], axis=1
    )
