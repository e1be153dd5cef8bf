"""Draw a replay's charts as SVG for the report, slides, papers and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

import numpy as np

from eplb_core.atomic_write import OutputError, write_atomically
from eplb_core.placement import Float64, mean_par
from eplb_service.replay.result import PolicyReplay, Replay
from eplb_service.report.svg import MARKERS, Dot, Line, Look, dots_and_front, heat_maps, lines_over_steps

_COLOURS = ("#2463be", "#d4691a", "#15803d", "#a21caf", "#b91c1c", "#0e7490", "#854d0e", "#4338ca")
_DASHES = ("", "8 3", "2 2", "10 2 2 2", "5 2 2 2 2 2", "14 4")
_GREY = "#8a8d91"
_BASELINE_DASHES = {"floor": "2 3", "initial placement": "", "hindsight": "7 4"}
"""Dash patterns of the baseline lines."""


class Picture(str):
    """Content of an SVG file, which notebooks display as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def write_pictures(folder: Path, replay: Replay) -> None:
    """Write each chart as an SVG file into the directory ``folder``, creating it if necessary.

    Raises ``OutputError`` if the directory or a file cannot be written.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created ({error.strerror})") from error
    for name, picture in pictures_of(replay).items():
        write_atomically(folder / name, picture.encode())


def pictures_of(replay: Replay) -> dict[str, Picture]:
    """Draw the charts of a replay.

    Parameters
    ----------
    replay
        Replay with at least one policy.

    Returns
    -------
    dict of str to Picture
        SVG files keyed by name, such as ``par.svg``. A notebook displays them as pictures.
    """
    best = best_policy(replay)
    initial = replay.baseline(best.setup)
    # The initial placement is already drawn as a baseline, so ``none`` is shown only if there is no other policy.
    policies = [policy for policy in replay.policies if policy.policy != "none"] or replay.policies
    looks = _looks(policies)
    end = replay.first + replay.steps

    def lines(name: str) -> list[Line]:
        return [
            _along(policy, looks[policy.label], [getattr(decision, name) for decision in policy.decisions])
            for policy in policies
        ]

    charts = {
        "par.svg": lines_over_steps(
            "Peak-to-average ratio of the scored steps",
            "step",
            _par_lines(replay, lines("par_realised")),
            end,
        ),
        "moves.svg": lines_over_steps("Slots that receive weights per interval", "step", lines("moves"), end),
        "pareto.svg": _balance_against_moves(replay, policies, looks),
        "ranks.svg": heat_maps(
            "Tokens of each rank over the mean rank",
            "rank",
            "layer",
            {"initial placement": _over_mean(initial.loads_LR), best.label: _over_mean(best.loads_LR)},
        ),
        "layers.svg": heat_maps(
            "PAR of each layer",
            "decision",
            "layer",
            {"initial placement": initial.par_DL.T, best.label: best.par_DL.T},
        ),
    }
    return {name: Picture(svg) for name, svg in charts.items()}


def best_policy(replay: Replay) -> PolicyReplay:
    """Return the policy with the lowest realised PAR."""
    return min(replay.policies, key=lambda policy: policy.par_realised)


def _looks(policies: Sequence[PolicyReplay]) -> dict[str, Look]:
    """Return a distinct look for each policy, keyed by label."""
    styles = cycle(product(zip(_DASHES, MARKERS, strict=True), _COLOURS))
    return {
        policy.label: Look(colour, dashes, marker)
        for policy, ((dashes, marker), colour) in zip(policies, styles, strict=False)
    }


def _along(policy: PolicyReplay, look: Look, values: Sequence[float], name: str = "") -> Line:
    """Return a line with one value per decision of a policy."""
    return Line(name or policy.label, look, [decision.step for decision in policy.decisions], values)


def _par_lines(replay: Replay, policy_lines: Sequence[Line]) -> list[Line]:
    """Return the baselines over the trace, followed by the realised PAR of each policy."""
    lines = []
    for baseline in replay.baselines:
        suffix = "" if len(replay.baselines) == 1 else baseline.label.removeprefix("baseline")
        values = {"floor": baseline.rows("floor_L"), "initial placement": baseline.par_DL}
        hindsight_DL = replay.hindsight_DL(baseline.setup)
        if hindsight_DL is not None:
            values["hindsight"] = hindsight_DL
        for name, par_DL in values.items():
            look = Look(_GREY, _BASELINE_DASHES[name])
            lines.append(_along(baseline, look, mean_par(par_DL, axis=1).tolist(), f"{name}{suffix}"))
    return [*lines, *policy_lines]


def _balance_against_moves(
    replay: Replay, policies: Sequence[PolicyReplay], looks: Mapping[str, Look]
) -> str:
    """Plot the PAR of each policy against its moves, with the Pareto front."""
    dots = [
        Dot(policy.label, looks[policy.label], replay.moved_per_100_steps(policy), policy.par_realised)
        for policy in policies
    ]
    front = list(_front((dot.x, dot.y) for dot in dots))
    return dots_and_front(
        "Balance against moves", "slots that receive weights per 100 steps", "PAR", dots, front
    )


def _front(dots: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the Pareto front in order of increasing moves: dots that no other dot beats on both moves and PAR.

    Examples
    --------
    >>> list(_front([(0.2, 1.6), (0.1, 1.5), (0.3, 1.2)]))
    [(0.1, 1.5), (0.3, 1.2)]
    """
    lowest_par = np.inf
    for moved, par in sorted(dots):
        if par < lowest_par:
            lowest_par = par
            yield moved, par


def _over_mean(loads_LR: Float64) -> Float64:
    """Return each rank's load divided by the mean load in its layer, float64 ``[L, R]``."""
    mean_L1 = loads_LR.mean(axis=1, keepdims=True)
    ratio_LR: Float64 = loads_LR / np.where(mean_L1 > 0, mean_L1, 1.0)
    return ratio_LR
