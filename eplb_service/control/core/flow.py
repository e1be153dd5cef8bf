"""Flow of heat from the ranks to the service: limits, load shedding, and detection of late ranks and stalls.

All types are immutable. Their ``after`` methods return the new state, given the ranks' reports and the current time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eplb_core.heat.sources import HeatPhase
from eplb_core.planner.settings import EVEN
from eplb_core.wire.agent import MAX_BLOCKS

MIN_STEPS = 16
"""Number of steps per report in a small group."""
MAX_STEPS = 64
"""Maximum number of steps per report, used in large groups. The layers' heat rings cannot hold more steps."""
_REPORTS_PER_WINDOW = 4
"""Minimum number of reports per window, and per decision interval."""
_RANKS_PER_STEP = 5
"""Maximum ratio of a group's ranks to the steps in each report. Groups that would exceed it send longer reports. At 20
steps per second, a ratio of five yields 100 reports per second in total."""
_SHEDDING_CHECK_SECONDS = 20.0
"""Time between checks for steps that the ranks have dropped."""
_CALM_SECONDS = 300.0
"""Time without dropped steps after which the ranks are asked to report more heat."""
_IDLE_SECONDS = 30.0
"""Time without a new step after which the ranks count as idle."""
LATE_SECONDS = 5.0
"""How long a rank's heat must be late before the service reacts."""
HELD_SECONDS = 10.0
"""Maximum delay of a report from a rank that is ahead of slower ranks."""


@dataclass(frozen=True)
class Limits:
    """Limits that apply to one deployment.

    Parameters
    ----------
    window_steps
        Maximum number of steps that a decision uses.
    pending_steps
        Maximum number of steps by which the fastest rank's reports may be ahead of the slowest rank's. It also limits
        the length of one report.
    plan_timeout
        Seconds without a report from any rank after which a plan times out.
    interval
        Number of steps before the first decision; also the maximum number of steps between later ones.
    by_clock
        True if decisions are due every ``interval`` steps, regardless of the realised PAR. This is the case for
        policies other than this project's own.
    cpu_share
        Fraction of one core that decisions may use, averaged over several intervals.
    report_steps
        Number of steps per report; ``None`` to derive it from the number of ranks.
    heat_phase
        Phase of the steps that decisions use: all steps, only prefill steps (some rank prefills), or only decode steps
        (no rank prefills).
    split
        Split (of an expert's tokens over its replicas) that the service assumes when planning.

    Examples
    --------
    Groups of more than 80 ranks send reports of more than 16 steps:

    >>> limits = Limits(window_steps=512, pending_steps=512, plan_timeout=60.0)
    >>> [limits.steps_per_report(ranks) for ranks in (80, 128, 1024)]
    [16, 32, 64]
    """

    window_steps: int
    pending_steps: int
    plan_timeout: float
    interval: int | None = None
    by_clock: bool = False
    cpu_share: float = 1.0
    report_steps: int | None = None
    heat_phase: HeatPhase = "all"
    split: str = EVEN

    @property
    def decision_steps(self) -> int:
        """Length of the window or of the decision interval, whichever is shorter, in steps."""
        return self.window_steps if self.interval is None else min(self.window_steps, self.interval)

    def steps_per_report(self, ranks: int) -> int:
        """Return the number of steps that each rank of a group of ``ranks`` combines into one report.

        A report costs nearly the same regardless of its length, so large groups send long ones. The drawback is that
        the service detects a change in heat later.
        """
        if self.report_steps is not None:
            return self.report_steps
        steps = MIN_STEPS
        max_steps = min(self.decision_steps // _REPORTS_PER_WINDOW, MAX_STEPS)
        while ranks > _RANKS_PER_STEP * steps and 2 * steps <= max_steps:
            steps *= 2
        return steps


@dataclass(frozen=True)
class Shedding:
    """Load shedding: the fraction of its heat that each rank of a deployment reports (immutable).

    Steps are grouped into numbered blocks, and all ranks report the same one in every ``one_in`` blocks. The reported
    steps are therefore complete. If each of 1,024 ranks instead dropped one report in ten independently, only one step
    in 10^47 would be complete.

    Parameters
    ----------
    one_in
        Each rank reports one in ``one_in`` blocks.
    dropped
        Number of steps that each connected rank had dropped by the last check, keyed by rank.
    looked_at
        Time of the last check, in seconds; ``None`` before the first one.
    calm_since
        Start of the current period without dropped steps, or time of the last increase of the reported fraction if that
        is later.

    Examples
    --------
    If more than half of the ranks drop steps between checks, the reported fraction is halved:

    >>> shedding = Shedding().after(0.0, {0: 0, 1: 0, 2: 0})
    >>> shedding.after(20.0, {0: 16, 1: 32, 2: 0}).one_in
    2
    """

    one_in: int = 1
    dropped: Mapping[int, int] = field(default_factory=dict)
    looked_at: float | None = None
    calm_since: float = 0.0

    def joined(self, rank: int) -> Shedding:
        """Return the state after a rank has connected.

        Steps that it dropped while it was disconnected do not indicate an overloaded service, so its count restarts.
        """
        if rank not in self.dropped:
            return self
        dropped = {connected: steps for connected, steps in self.dropped.items() if connected != rank}
        return replace(self, dropped=dropped)

    def after(self, now: float, dropped: Mapping[int, int]) -> Shedding:
        """Return the state at time ``now``; ``dropped`` counts the steps that each connected rank has dropped."""
        if self.looked_at is None:
            return replace(self, dropped=dict(dropped), looked_at=now, calm_since=now)
        if now - self.looked_at < _SHEDDING_CHECK_SECONDS:
            return self
        dropping_ranks = sum(steps > self.dropped.get(rank, steps) for rank, steps in dropped.items())
        one_in = self.one_in
        calm_since = now if dropping_ranks else self.calm_since
        if 2 * dropping_ranks > len(dropped):
            one_in = min(2 * one_in, MAX_BLOCKS)
        elif now - calm_since >= _CALM_SECONDS:
            one_in = max(1, one_in // 2)
            calm_since = now
        return Shedding(one_in, dict(dropped), now, calm_since)


@dataclass(frozen=True)
class LateRanks:
    """Ranks whose heat is late (immutable). No rank is late while the whole group is idle.

    Parameters
    ----------
    since
        Time at which each late rank was first observed to be late, keyed by rank.
    steps
        Lag of the slowest rank's heat behind the fastest rank's, in steps.
    now
        Time of the last update, in seconds.
    step
        Highest step that any rank has reached.
    stepped_at
        Time at which that step was first observed.
    """

    since: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0
    now: float = 0.0
    step: int = 0
    stepped_at: float = 0.0

    def after(self, now: float, step: int, ranks: Sequence[int], steps: int) -> LateRanks:
        """Return the state at time ``now``.

        Parameters
        ----------
        now
            Current time, in seconds.
        step
            Highest step that any rank has reached.
        ranks
            Connected ranks whose heat is late.
        steps
            Lag of the slowest rank's heat behind the fastest rank's, in steps.
        """
        stepped_at = now if step != self.step else self.stepped_at
        late_ranks = ranks if now - stepped_at < _IDLE_SECONDS else ()
        since = {rank: self.since.get(rank, now) for rank in late_ranks}
        return LateRanks(since, steps, now, step, stepped_at)

    def for_seconds(self, seconds: float) -> tuple[list[int], float]:
        """Return the ranks that have been late for more than ``seconds``, and the longest time among them."""
        durations = {rank: self.now - since for rank, since in self.since.items()}
        durations = {rank: duration for rank, duration in durations.items() if duration > seconds}
        return list(durations), max(durations.values(), default=0.0)


@dataclass(frozen=True)
class Stall:
    """Time and steps that have passed since a counter last changed (immutable).

    Parameters
    ----------
    count
        Value of the counter; ``None`` while it cannot grow.
    since
        Time at which the counter was first observed at this value, in seconds.
    step
        Highest step that any rank had reached at that time.
    seconds
        Seconds from ``since`` to the last update.
    steps
        Number of steps that the rank furthest ahead has run since that time.
    """

    count: int | None = None
    since: float = 0.0
    step: int = 0
    seconds: float = 0.0
    steps: int = 0

    def after(self, now: float, step: int, count: int | None) -> Stall:
        """Return the state at time ``now``, given the highest step of any rank and the counter's value."""
        if count is None or count != self.count or step < self.step:
            return Stall(count, now, step)
        return replace(self, seconds=now - self.since, steps=step - self.step)
