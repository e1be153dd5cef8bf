"""The charts of a replay as PNG, for slides and issues; needs matplotlib (the extra ``report``)."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eplb_service.atomic_write import OutputError, write_atomically
from eplb_service.placement import mean_par
from eplb_service.replay.result import PolicyReplay, Replay
from eplb_service.report.figures import over_mean, pareto_points

NAMES = ("par.png", "moves.png", "pareto.png", "ranks.png")
"""Files that ``write_pictures`` writes."""

_SIZE = (10.0, 4.0)
_DOTS_PER_INCH = 150
_LEAST_SPAN = 0.05
_COLOURS = ("#2463be", "#d4691a", "#15803d", "#a21caf", "#b91c1c", "#0e7490", "#854d0e", "#4338ca")
_DASHES = ("-", "--", ":", "-.", (0, (12, 3)))
_MARKERS = ("o", "s", "^", "D", "v")
"""Dots of policies whose lines are dashed as in ``_DASHES``."""


def write_pictures(folder: Path, replay: Replay) -> None:
    """Write one PNG per chart into ``folder``, which is made where it is missing.

    Raises ``OutputError`` where matplotlib is not installed or nothing can be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OutputError("PNGs need matplotlib: pip install 'eplb-service[report]'") from error
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
    draw = {"par.png": _par, "moves.png": _moves, "pareto.png": _pareto, "ranks.png": _ranks}
    for name in NAMES:
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw[name](figure, replay)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
        write_atomically(folder / name, buffer.getvalue())


def _par(figure: Any, replay: Replay) -> None:
    axes = figure.subplots()
    for policy, (colour, dashes) in zip(replay.policies, _styles(replay), strict=True):
        steps, values = _held(policy, [decision.par_realised for decision in policy.decisions])
        axes.step(steps, values, where="post", label=policy.label, color=colour, linestyle=dashes)
    first = replay.policies[0]
    known = {"floor": replay.baseline(first.setup).floor_DL, "hindsight": replay.hindsight_DL(first.setup)}
    for (name, par_DL), style in zip(known.items(), (":", "--"), strict=True):
        if par_DL is not None:
            held = _held(first, mean_par(par_DL, axis=1).tolist())
            axes.step(*held, where="post", label=name, color="grey", linestyle=style, linewidth=1)
    _finish(axes, "step", "realised PAR, mean over layers")


def _moves(figure: Any, replay: Replay) -> None:
    axes = figure.subplots()
    for policy, (colour, dashes) in zip(replay.policies, _styles(replay), strict=True):
        if policy.policy != "none":
            values = [float(decision.moves) for decision in policy.decisions]
            axes.step(
                *_held(policy, values), where="post", label=policy.label, color=colour, linestyle=dashes
            )
    _finish(axes, "step", "slots that receive weights at a decision")


def _pareto(figure: Any, replay: Replay) -> None:
    axes = figure.subplots()
    classes = {policy.label: policy.label for policy in replay.policies}
    styles = dict(zip(classes, _styles(replay), strict=True))
    points = pareto_points(replay, classes)
    for point in points:
        colour, dashes = styles[point.name]
        marker = _MARKERS[_DASHES.index(dashes)]
        axes.plot(100 * point.moves, point.par, marker, label=point.name, color=colour)
    # Differences that nobody would feel must not fill the picture.
    pars = [point.par for point in points]
    axes.set(xlim=(-0.5, None), ylim=(min(pars) - _LEAST_SPAN / 2, max(pars) + _LEAST_SPAN / 2))
    _finish(axes, "slots that receive weights at a decision, %", "realised PAR")


def _ranks(figure: Any, replay: Replay) -> None:
    best = min(replay.policies, key=lambda policy: policy.par_realised)
    both = {"left alone": replay.baseline(best.setup).loads_LR, best.label: best.loads_LR}
    image = None
    for axes, (title, loads_LR) in zip(figure.subplots(1, 2, sharey=True), both.items(), strict=True):
        image = axes.imshow(over_mean(loads_LR), cmap="coolwarm", vmin=0, vmax=2, aspect="auto")
        axes.set(title=title, xlabel="rank")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("layer")
    figure.axes[0].yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=figure.axes, label="tokens over the mean rank", extend="max")


def _styles(replay: Replay) -> list[tuple[str, Any]]:
    """Colour and dashes of each policy; doing nothing is grey."""
    others: Iterator[tuple[Any, str]] = itertools.cycle(itertools.product(_DASHES, _COLOURS))
    styles: list[tuple[str, Any]] = []
    for policy in replay.policies:
        dashes, colour = ("-", "grey") if policy.policy == "none" else next(others)
        styles.append((colour, dashes))
    return styles


def _held(policy: PolicyReplay, values: list[float]) -> tuple[list[int], list[float]]:
    """Steps and values, the last one held to the end of its steps."""
    steps = [decision.step for decision in policy.decisions]
    return [*steps, steps[-1] + policy.decisions[-1].steps], [*values, values[-1]]


def _finish(axes: Any, x_label: str, y_label: str) -> None:
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside right upper", frameon=False)
