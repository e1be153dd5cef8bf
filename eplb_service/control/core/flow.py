"""Flow of heat from the ranks: its bounds, the share of it that is asked for, and when something has stopped.

All are values that change with what the ranks report and with the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eplb_core.heat.sources import HeatPhase
from eplb_core.wire.agent import MAX_BLOCKS

MIN_STEPS, MAX_STEPS = 16, 64
"""Steps of one report; the heat rings of layers hold no more."""
_PART_OF_WINDOW = 4
"""A report is no longer than a fourth of the steps that decisions look at, or that are between them."""
_RANKS_PER_STEP = 5
"""More ranks for each step of a report are too many: at 20 steps per second they send 100 reports per second."""
_SHED_LOOK_SECONDS = 20.0
_CALM_SECONDS = 300.0
"""Time without drops after which more heat is asked for again."""
_IDLE_SECONDS = 30.0
LATE_SECONDS = 5.0
"""Time for which a rank's heat is late before anything follows from it."""
HELD_SECONDS = 10.0
"""Longest that a rank which is ahead of slower ones is held back."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a deployment.

    Parameters
    ----------
    window_steps
        Steps that a decision looks at at most.
    pending_steps
        Steps that the fastest rank's reports may be ahead of the slowest's; also the most steps of one report.
    plan_timeout
        Seconds of silence that end a plan.
    interval
        Steps before the first decision, and between later ones at most.
    by_clock
        Decisions fall every interval, whatever is realised: the policy is not this project's.
    cpu_share
        Part of a core that decisions take, on average over several intervals.
    report_steps
        Steps of the ranks' reports; ``None`` where they follow the number of ranks.
    heat_phase
        The steps that decisions look at: all, those in which a rank prefills, or those in which none does.
    routed_by_tables
        True if hosts route tokens by the tables, and not by a rule of their own.
    """

    window_steps: int
    pending_steps: int
    plan_timeout: float
    interval: int | None = None
    by_clock: bool = False
    cpu_share: float = 1.0
    report_steps: int | None = None
    heat_phase: HeatPhase = "all"
    routed_by_tables: bool = False

    @property
    def decision_steps(self) -> int:
        """Steps after which something should have come of them: the window, or the interval where that is shorter."""
        return self.window_steps if self.interval is None else min(self.window_steps, self.interval)

    def steps_per_report(self, ranks: int) -> int:
        """Steps that each of so many ranks gathers into one report.

        A report's cost hardly depends on its steps, so that many ranks send long ones, and a change of their heat is
        noticed so many steps later.
        """
        if self.report_steps is not None:
            return self.report_steps
        steps, most = MIN_STEPS, min(self.decision_steps // _PART_OF_WINDOW, MAX_STEPS)
        while ranks > _RANKS_PER_STEP * steps and 2 * steps <= most:
            steps *= 2
        return steps


@dataclass(frozen=True)
class Shedding:
    """Share of their heat that the ranks of a deployment are asked for (immutable).

    All leave out the same steps, so that the others are whole: of 1,024 ranks of which each drops what it cannot send
    in time, and sends nine of ten reports, all have the same one once in 10^47.

    Of ``one_in`` blocks of steps they report one. When last looked at each had dropped so many steps, and since
    ``calm_since`` none dropped any.
    """

    one_in: int = 1
    dropped: Mapping[int, int] = field(default_factory=dict)
    looked_at: float | None = None
    calm_since: float = 0.0

    def joined(self, rank: int) -> Shedding:
        """A rank is here, or is back: what it dropped while it could not send says nothing of this service."""
        others = {other: steps for other, steps in self.dropped.items() if other != rank}
        return replace(self, dropped=others) if rank in self.dropped else self

    def after(self, now: float, dropped: Mapping[int, int]) -> Shedding:
        """Look at the clock; each connected rank has dropped so many steps by now."""
        if self.looked_at is None:
            return replace(self, dropped=dict(dropped), looked_at=now, calm_since=now)
        if now - self.looked_at < _SHED_LOOK_SECONDS:
            return self
        dropping = sum(steps > self.dropped.get(rank, steps) for rank, steps in dropped.items())
        one_in, calm_since = self.one_in, now if dropping else self.calm_since
        if 2 * dropping > len(dropped):
            one_in = min(2 * one_in, MAX_BLOCKS)
        elif now - calm_since >= _CALM_SECONDS:
            one_in, calm_since = max(1, one_in // 2), now
        return Shedding(one_in, dict(dropped), now, calm_since)


@dataclass(frozen=True)
class Late:
    """Ranks whose heat is late (immutable): each by when it was first seen so, and by how many steps they are at most.

    None is late while no rank makes steps: the furthest has been at ``step`` since ``stepped_at``.
    """

    since: Mapping[int, float] = field(default_factory=dict)
    steps: int = 0
    now: float = 0.0
    step: int = 0
    stepped_at: float = 0.0

    def after(self, now: float, step: int, ranks: Sequence[int], steps: int) -> Late:
        """Look at the clock, in seconds, the furthest rank's step, and the ranks that are late."""
        stepped_at = now if step != self.step else self.stepped_at
        late = ranks if now - stepped_at < _IDLE_SECONDS else ()
        return Late({rank: self.since.get(rank, now) for rank in late}, steps, now, step, stepped_at)

    def for_seconds(self, seconds: float) -> tuple[list[int], float]:
        """Return the ranks that have been late for more than so long, and the longest time of any."""
        found = {rank: self.now - since for rank, since in self.since.items() if self.now - since > seconds}
        return list(found), max(found.values(), default=0.0)


@dataclass(frozen=True)
class Stall:
    """Time and steps of the ranks since a count has last grown (immutable).

    ``count`` has been what it is for ``seconds`` and ``steps``: since a time in seconds, when the furthest rank was at
    ``step``. It is ``None`` while it cannot grow.
    """

    count: int | None = None
    since: float = 0.0
    step: int = 0
    seconds: float = 0.0
    steps: int = 0

    def after(self, now: float, step: int, count: int | None) -> Stall:
        """Look at the clock, the furthest rank's step, and the count."""
        if count is None or count != self.count or step < self.step:
            return Stall(count, now, step)
        return replace(self, seconds=now - self.since, steps=step - self.step)
