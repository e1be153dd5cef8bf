"""Findings of one run of the load generator, and the targets that they are held to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.scale.measured_service import LONG_SECONDS, Holds
from benchmarks.solver.judged import Target

_CHEAP_RANKS = 256
_MOST_PERCENT = 10.0
_MOST_GROWN_MB = 16.0
_KEEPS_UP = 0.98
"""Of the steps wanted, less those of one report: what is under way when the clock stops has not been lost."""
_FLAT_SECONDS = 300.0
"""Windows and caches have filled by half of that; half an hour says more of the same."""
_PLAN_SECONDS = 5.0
_SAYING_REPORTS = 4
"""A rate is read off whole reports: over fewer of each rank it says where the clock stopped."""


@dataclass(frozen=True)
class Measured:
    """Findings of one run; rates are per second of the clock, CPU is the service's.

    Parameters
    ----------
    steps_per_second, wanted_per_second
        Steps of which all ranks' heat was put together, and steps that the ranks made.
    cpu_ms_per_step, cpu_percent
        Of its process per step that the ranks made, and of one core.
    lost_steps, dropped_steps
        Over the whole run: missed by the service; dropped by agents, over all ranks.
    megabytes_per_second, reports_per_second
        Heat that the agents sent.
    resident_mb, peak_mb
        Memory, from the beginning of the measurement to its end at equal times; ``peak_mb`` is the most of the run.
    joining, holding, deciding
        Holds of the event loop: at first, over the measurement, and from the decision until its plan is carried out.
    deciding_cpu_seconds, carrying_cpu_percent, switched
        The service's and the agents' from the end of the first decision's interval until its plan was at all ranks; the
        service's part of a core while that was carried out; layers that the ranks switched, over all ranks.
    plan_ms
        From the end of the first decision's interval until the last rank had sent its heat of it, and the first and the
        last had its plan; ``None`` where one never did.
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
        """Steps in a report; 0 where there was none."""
        reports = self.reports_per_second
        return self.ranks * self.wanted_per_second / reports if reports else 0.0

    @property
    def made_steps(self) -> float:
        """Steps that the ranks made over the measurement."""
        return self.wanted_per_second * self.seconds

    @property
    def keeps_up(self) -> bool:
        """Whether steps were put together as fast as they were made."""
        return self.steps_per_second * self.seconds + self.report_steps >= _KEEPS_UP * self.made_steps

    @property
    def grown_mb(self) -> float:
        """Memory at the end beside that at half-time: until then the window fills."""
        return self.resident_mb[-1] - self.resident_mb[len(self.resident_mb) // 2]

    @property
    def all_holds(self) -> Holds:
        """Holds of the event loop from the first rank to the last plan."""
        return Holds.merged((self.joining, self.holding, self.deciding))


def verdicts(measured: Iterable[Measured]) -> Iterator[Target]:
    """Each run beside every target that it is long enough to say something of."""
    for one in measured:
        says_rate = one.made_steps >= _SAYING_REPORTS * one.report_steps
        judged: list[tuple[str, str, bool]] = []
        if one.ranks == _CHEAP_RANKS and says_rate:
            found = f"{one.cpu_percent:.1f} % at {one.steps_per_second:.1f} steps/s"
            cheap = one.cpu_percent <= _MOST_PERCENT and one.keeps_up
            judged.append((f"cost {_MOST_PERCENT:g} % of a core or less", found, cheap))
        if says_rate:
            found = f"{one.steps_per_second:.1f} of {one.wanted_per_second:g} steps/s"
            judged.append(("steps are put together as fast as they are made", found, one.keeps_up))
        lost = f"{one.lost_steps} lost, {one.dropped_steps} dropped"
        judged.append(("no step is lost or dropped", lost, one.lost_steps == one.dropped_steps == 0))
        held = one.all_holds.cpu
        longest = f"nothing holds the event loop for more than {1e3 * LONG_SECONDS:g} ms of CPU"
        judged.append((longest, f"{1e3 * held:.1f} ms", held <= LONG_SECONDS))
        if one.seconds >= _FLAT_SECONDS:
            grown = f"{one.grown_mb:+.1f} MB in the last {one.seconds / 2:.0f} s"
            flat = f"memory grows by {_MOST_GROWN_MB:g} MB or less in the second half"
            judged.append((flat, grown, one.grown_mb <= _MOST_GROWN_MB))
        arrived = "none"
        if one.plan_ms is not None:
            arrived = f"the last after {one.plan_ms[-1]:.0f} ms, {one.plan_ms[0]:.0f} of them until its heat is sent"
        soon = one.plan_ms is not None and one.plan_ms[-1] <= 1e3 * _PLAN_SECONDS
        judged.append(
            (f"the first plan is at every rank {_PLAN_SECONDS:g} s after the interval", arrived, soon)
        )
        for what, found, met in judged:
            yield Target(f"{one.ranks:,} ranks: {what}", "", found, met)
