"""What one service is to hold, and whether a run shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.scale.holds import LONG_SECONDS
from benchmarks.scale.measured import Measured

_LONG_MS = 1e3 * LONG_SECONDS
_MOST_PERCENT = 10.0
_MOST_GROWN_MB = 16.0
_KEEPS_UP = 0.98
"""Of the steps wanted, less those of one report: what is under way when the clock stops has not been lost."""
_FLAT_SECONDS = 300.0
"""Windows and caches have filled by half of that; half an hour says more of the same."""
_SAYING_REPORTS = 4
"""A rate is read off whole reports: over fewer of each rank it says where the clock stopped."""
MISSED = "missed"


@dataclass(frozen=True)
class Target:
    """One figure that a run is held to.

    Parameters
    ----------
    name
        What is to be so.
    ranks
        Of the deployments that it is for; ``None`` for all.
    figure
        What the run found, for people.
    is_met
        Whether that is enough.
    seconds
        That a run must last at least to show it.
    reports
        Of each rank that it must see at least.
    """

    name: str
    ranks: int | None
    figure: Callable[[Measured], str]
    is_met: Callable[[Measured], bool]
    seconds: float = 0.0
    reports: float = 0.0


def _keeps_up(one: Measured) -> bool:
    put_together = one.steps_per_second * one.seconds + one.report_steps
    return put_together >= _KEEPS_UP * one.made_steps


TARGETS = (
    Target(
        f"256 ranks cost {_MOST_PERCENT:g} % of a core or less",
        256,
        lambda one: f"{one.cpu_percent:.1f} % at {one.steps_per_second:.1f} steps/s",
        lambda one: one.cpu_percent <= _MOST_PERCENT and _keeps_up(one),
        reports=_SAYING_REPORTS,
    ),
    Target(
        "steps are put together as fast as they are made",
        None,
        lambda one: f"{one.steps_per_second:.1f} of {one.wanted_per_second:g} steps/s",
        _keeps_up,
        reports=_SAYING_REPORTS,
    ),
    Target(
        "no step is lost or dropped",
        None,
        lambda one: f"{one.lost_steps} lost, {one.dropped_steps} dropped",
        lambda one: one.lost_steps == one.dropped_steps == 0,
    ),
    Target(
        f"nothing holds the event loop for more than {_LONG_MS:g} ms of CPU",
        None,
        lambda one: f"{one.longest_hold_ms:.1f} ms",
        lambda one: one.longest_hold_ms <= _LONG_MS,
    ),
    Target(
        f"memory grows by {_MOST_GROWN_MB:g} MB or less in the second half of {_FLAT_SECONDS / 60:g} minutes or more",
        None,
        lambda one: f"{one.grown_mb:+.1f} MB in the last {one.seconds / 2:.0f} s",
        lambda one: one.grown_mb <= _MOST_GROWN_MB,
        _FLAT_SECONDS,
    ),
    Target(
        "a plan reaches every rank",
        None,
        lambda one: (
            "no plan was asked for, or a rank did not get it"
            if one.plan_ms is None
            else f"the last after {one.plan_ms[1]:.0f} ms"
        ),
        lambda one: one.plan_ms is not None,
    ),
)


def verdicts(measured: Iterable[Measured]) -> Iterator[tuple[int, str, str, str]]:
    """For each run and target of its size: ranks, target, figure, and ``met``, ``missed`` or ``too short to say``."""
    for one in measured:
        for target in TARGETS:
            if target.ranks in (None, one.ranks):
                yield one.ranks, target.name, target.figure(one), _verdict(target, one)


def _verdict(target: Target, one: Measured) -> str:
    if one.seconds < target.seconds or one.made_steps < target.reports * one.report_steps:
        return "too short to say"
    return "met" if target.is_met(one) else MISSED
