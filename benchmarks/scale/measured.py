"""Figures from one run of the load generator, and their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.scale.measured_service import LONG_SECONDS, Holds
from benchmarks.solver.judged import Target

_CHEAP_RANKS = 256
_MAX_PERCENT = 10.0
_MAX_GROWTH_MB = 16.0
_MIN_ASSEMBLED = 0.98
"""Minimum fraction of the ranks' steps that must be assembled. One report may still be in transit at the end."""
_FLAT_SECONDS = 300.0
"""Minimum run length in seconds for judging memory growth.

Windows and caches are full after half of that time, and even a half-hour run shows no further effect.
"""
_PLAN_SECONDS = 5.0
_MIN_REPORTS = 4
"""Minimum number of reports per rank for judging a rate.

Only complete reports count, so the result of a shorter run depends on when the clock stops.
"""


@dataclass(frozen=True)
class Measured:
    """Figures from one run. Rates are per second of wall-clock time.

    Parameters
    ----------
    ranks
        Number of ranks.
    seconds
        Length of the measurement.
    steps_per_second
        Steps per second that the service assembled from all ranks' heat.
    wanted_per_second
        Steps per second that the ranks ran.
    cpu_ms_per_step
        Service CPU time per step that the ranks ran, in milliseconds.
    cpu_percent
        Service CPU time, in percent of one core.
    deciding_cpu_seconds
        CPU seconds used by the service and by the agents, from the end of the first decision's interval until every
        rank had its plan.
    carrying_cpu_percent
        Service CPU time while the plan was carried out, in percent of one core.
    lost_steps
        Number of steps that the service missed in the whole run.
    dropped_steps
        Number of steps that the agents dropped in the whole run, summed over all ranks.
    switched
        Number of layer switches, summed over all ranks.
    megabytes_per_second
        Heat that the agents sent, in megabytes per second.
    reports_per_second
        Number of heat reports that the agents sent per second.
    resident_mb
        Service memory at equal intervals, from the start of the measurement to its end.
    peak_mb
        Maximum service memory in the whole run.
    joining
        Longest block of the event loop while the ranks joined.
    holding
        Longest block of the event loop during the measurement.
    deciding
        Longest block of the event loop from the decision until its plan was carried out.
    plan_ms
        Milliseconds from the end of the first decision's interval until the last rank had sent its heat, until the
        first rank had a plan, and until the last rank had a plan. ``None`` if a rank never received a plan.
    """

    ranks: int
    seconds: float
    steps_per_second: float
    wanted_per_second: float
    cpu_ms_per_step: float
    cpu_percent: float
    deciding_cpu_seconds: tuple[float, float]
    carrying_cpu_percent: float
    lost_steps: int
    dropped_steps: int
    switched: int
    megabytes_per_second: float
    reports_per_second: float
    resident_mb: tuple[float, ...]
    peak_mb: float
    joining: Holds
    holding: Holds
    deciding: Holds
    plan_ms: tuple[float, float, float] | None

    @property
    def report_steps(self) -> float:
        """Number of steps per report, or 0 if there are no reports."""
        reports = self.reports_per_second
        return self.ranks * self.wanted_per_second / reports if reports else 0.0

    @property
    def made_steps(self) -> float:
        """Number of steps that the ranks ran during the measurement."""
        return self.wanted_per_second * self.seconds

    @property
    def keeps_up(self) -> bool:
        """True if the service assembled steps as fast as the ranks ran them."""
        return self.steps_per_second * self.seconds + self.report_steps >= _MIN_ASSEMBLED * self.made_steps

    @property
    def grown_mb(self) -> float:
        """Memory growth in the second half of the run, in MB. The window fills up in the first half."""
        return self.resident_mb[-1] - self.resident_mb[len(self.resident_mb) // 2]

    @property
    def all_holds(self) -> Holds:
        """Longest block of the event loop in the whole run."""
        return Holds.merged((self.joining, self.holding, self.deciding))


def verdicts(measured: Iterable[Measured]) -> Iterator[Target]:
    """Yield the targets for each run. Skip targets that need a longer run."""
    for run in measured:
        can_judge_rate = run.made_steps >= _MIN_REPORTS * run.report_steps
        judged: list[tuple[str, str, bool]] = []
        if run.ranks == _CHEAP_RANKS and can_judge_rate:
            cost = f"{run.cpu_percent:.1f} % at {run.steps_per_second:.1f} steps/s"
            cheap = run.cpu_percent <= _MAX_PERCENT and run.keeps_up
            judged.append((f"the service uses at most {_MAX_PERCENT:g} % of a core", cost, cheap))
        if can_judge_rate:
            rate = f"{run.steps_per_second:.1f} of {run.wanted_per_second:g} steps/s"
            judged.append(("steps are assembled as fast as the ranks run them", rate, run.keeps_up))
        lost = f"{run.lost_steps} lost, {run.dropped_steps} dropped"
        judged.append(("no step is lost or dropped", lost, run.lost_steps == run.dropped_steps == 0))
        longest = run.all_holds.cpu
        limit = f"no callback blocks the event loop for more than {1e3 * LONG_SECONDS:g} ms of CPU"
        judged.append((limit, f"{1e3 * longest:.1f} ms", longest <= LONG_SECONDS))
        if run.seconds >= _FLAT_SECONDS:
            grown = f"{run.grown_mb:+.1f} MB in the last {run.seconds / 2:.0f} s"
            flat = f"memory grows by at most {_MAX_GROWTH_MB:g} MB in the second half"
            judged.append((flat, grown, run.grown_mb <= _MAX_GROWTH_MB))
        arrived = "none"
        if run.plan_ms is not None:
            arrived = f"the last rank after {run.plan_ms[-1]:.0f} ms; all heat was sent after {run.plan_ms[0]:.0f} ms"
        soon = run.plan_ms is not None and run.plan_ms[-1] <= 1e3 * _PLAN_SECONDS
        judged.append(
            (
                f"the first plan reaches every rank within {_PLAN_SECONDS:g} s of the interval's end",
                arrived,
                soon,
            )
        )
        for name, figure, met in judged:
            yield Target(f"{run.ranks:,} ranks: {name}", "", figure, met)
