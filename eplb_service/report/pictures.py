"""The charts of a replay as SVG files, drawn with matplotlib: for the report, slides, papers and notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from eplb_service.atomic_write import OutputError, write_atomically
from eplb_service.placement import Float64, mean_par
from eplb_service.replay.result import PolicyReplay, Replay

_WIDTH = 9.6
_COLOURS = ("#2463be", "#d4691a", "#15803d", "#a21caf", "#b91c1c", "#0e7490", "#854d0e", "#4338ca")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (6, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_GREY = "#8a8d91"
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b0aea9",
    "axes.titlelocation": "left",
    "grid.color": "#eceae6",
    "legend.frameon": False,
}
_LEGEND: Any = {"loc": "outside lower left", "ncols": 3, "fontsize": "small"}


class _Line(NamedTuple):
    """A line over steps: its name, its look, where each value begins, and the values."""

    name: str
    look: Mapping[str, Any]
    steps: Sequence[int]
    values: Sequence[float]


class Picture(str):
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


def pictures_of(replay: Replay) -> dict[str, Picture]:
    """The charts of a replay by the names of their files."""
    best = best_policy(replay)
    alone = replay.baseline(best.setup)
    # Doing nothing is drawn as what policies are measured against; alone it is all that there is to see.
    policies = [policy for policy in replay.policies if policy.policy != "none"] or replay.policies
    looks = _looks(policies)
    end = replay.first + replay.steps

    def lines(name: str) -> list[_Line]:
        return [
            _along(policy, looks[policy.label], [getattr(one, name) for one in policy.decisions])
            for policy in policies
        ]

    with rc_context(_STYLE):
        figures = {
            "par.svg": _lines_over_steps(
                "Peak-to-average ratio of the steps served", _par_lines(replay, lines("par_realised")), end
            ),
            "moves.svg": _lines_over_steps("Slots that receive weights per interval", lines("moves"), end),
            "pareto.svg": _balance_against_moves(replay, policies, looks),
            "ranks.svg": _heat_maps(
                "Tokens of each rank over the mean rank",
                "rank",
                {"left alone": _over_mean(alone.loads_LR), best.label: _over_mean(best.loads_LR)},
            ),
            "layers.svg": _heat_maps(
                "PAR of each layer", "decision", {"left alone": alone.par_DL.T, best.label: best.par_DL.T}
            ),
        }
        return {name: _svg(name, figure) for name, figure in figures.items()}


def best_policy(replay: Replay) -> PolicyReplay:
    """The policy of least realised PAR."""
    return min(replay.policies, key=lambda policy: policy.par_realised)


def _looks(policies: Sequence[PolicyReplay]) -> dict[str, Mapping[str, Any]]:
    """Colour, dashes and marker of each policy by its label, as many as there are different."""
    styles = cycle(product(zip(_DASHES, _MARKERS, strict=True), _COLOURS))
    return {
        policy.label: {"color": colour, "linestyle": dashes, "marker": marker}
        for policy, ((dashes, marker), colour) in zip(policies, styles, strict=False)
    }


def _along(policy: PolicyReplay, look: Mapping[str, Any], values: Sequence[float], name: str = "") -> _Line:
    return _Line(name or policy.label, look, [decision.step for decision in policy.decisions], values)


def _par_lines(replay: Replay, policies: Sequence[_Line]) -> list[_Line]:
    """Realised PAR of each policy along the trace, after the lines that it is measured against."""
    lines = []
    for baseline in replay.baselines:
        also = "" if len(replay.baselines) == 1 else baseline.label.removeprefix("baseline")
        measured = {"floor": baseline.rows("floor_L"), "left alone": baseline.par_DL}
        hindsight_DL = replay.hindsight_DL(baseline.setup)
        if hindsight_DL is not None:
            measured["hindsight"] = hindsight_DL
        for (name, par_DL), dashes in zip(measured.items(), (":", "-", "--"), strict=False):
            look = {"color": _GREY, "linestyle": dashes}
            lines.append(_along(baseline, look, mean_par(par_DL, axis=1).tolist(), f"{name}{also}"))
    return [*lines, *policies]


def _lines_over_steps(title: str, lines: Sequence[_Line], end: int) -> Figure:
    """A line per policy, each value held from its decision to the next."""
    figure, axes = _chart(title, "step", len(lines))
    for line in lines:
        look = {name: line.look[name] for name in ("color", "linestyle")}
        axes.stairs(line.values, [*line.steps, end], baseline=None, linewidth=1.8, label=line.name, **look)
    axes.margins(x=0.01)
    figure.legend(**_LEGEND)
    return figure


def _balance_against_moves(
    replay: Replay, policies: Sequence[PolicyReplay], looks: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """PAR against moves, a dot per policy, and the front that none beats in both."""
    figure, axes = _chart("Balance against moves", "slots that receive weights in 100 steps", len(policies))
    dots = {policy.label: (replay.moved_per_100_steps(policy), policy.par_realised) for policy in policies}
    front = list(_front(dots.values()))
    axes.plot(*zip(*front, strict=True), color=_GREY, linestyle=":", zorder=1)
    for label, (moved, par) in dots.items():
        look = {name: looks[label][name] for name in ("color", "marker")}
        axes.scatter(moved, par, s=60, label=label, zorder=2, **look)
    axes.set_ylabel("PAR")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(**_LEGEND)
    return figure


def _front(dots: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Dots that no other beats in both moves and PAR, by moves."""
    least = np.inf
    for moved, par in sorted(dots):
        if par < least:
            least = par
            yield moved, par


def _heat_maps(title: str, x_title: str, maps: Mapping[str, Float64]) -> Figure:
    """Values around 1 of each layer, side by side: cool below it, warm above, on one scale that holds them all."""
    hottest = max(float(np.nanmax(values, initial=1.1)) for values in maps.values())
    rows = next(iter(maps.values())).shape[0]
    figure = Figure(figsize=(_WIDTH, min(6.0, max(2.4, 0.25 * rows + 1.4))), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    both = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(both, maps.items(), strict=True):
        norm = TwoSlopeNorm(1.0, 0.0, hottest)
        shown = axes.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel(x_title)
        axes.locator_params(integer=True)
    both[0].set_ylabel("layer")
    figure.colorbar(shown, ax=list(both), format="{x:.1f}x", label="over the mean")
    return figure


def _chart(title: str, x_title: str, named: int) -> tuple[Figure, Any]:
    """Axes with a grid, and room below for the names of so many lines or dots."""
    figure = Figure(figsize=(_WIDTH, 3.6 + 0.2 * -(-named // 3)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x_title)
    axes.grid(visible=True, axis="y")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(name: str, figure: Figure) -> Picture:
    """The figure's file, the same for the same figure; its title is there for those who cannot see it."""
    title = figure.get_suptitle() or figure.axes[0].get_title(loc="left")
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Title": title, "Creator": None, "Date": None})
    return Picture(buffer.getvalue())


def _over_mean(loads_LR: Float64) -> Float64:
    """Tokens of each rank over its layer's mean rank, float64 ``[L, R]``."""
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    ratio_LR: Float64 = loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)
    return ratio_LR
