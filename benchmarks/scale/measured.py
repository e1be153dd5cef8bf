"""What one run of the load generator found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """What one run found; rates are per second of the clock, CPU in seconds.

    Parameters
    ----------
    ranks
        R.
    seconds
        That it was measured for.
    steps_per_second, wanted_per_second
        Steps of which all ranks' heat was put together, and steps that the ranks made.
    cpu_ms_per_step, cpu_percent
        Of the service's process: per step that the ranks made, and of one core.
    loop_cpu_percent
        Of these, what its event loop took.
    lost_steps, dropped_steps
        That the service missed; that agents dropped, over all ranks.
    megabytes_per_second, reports_per_second
        Heat that the agents sent.
    resident_mb
        Memory, from the beginning of the measurement to its end at equal times.
    hold_ms, long_holds, holds_ms
        Longest callback by CPU, how many took over 20 ms, and the longest by name.
    plan_ms
        From the offer of a plan until the first rank, and the last, has it; ``None`` where none was made, or a rank
        never got it.
    decide_seconds
        That the decision before it took.
    hold_deciding_ms, holds_deciding_ms
        Longest callback meanwhile, and the longest by name.
    """

    ranks: int
    seconds: float
    steps_per_second: float
    wanted_per_second: float
    cpu_ms_per_step: float
    cpu_percent: float
    loop_cpu_percent: float
    lost_steps: int
    dropped_steps: int
    megabytes_per_second: float
    reports_per_second: float
    resident_mb: tuple[float, ...]
    hold_ms: float
    long_holds: int
    holds_ms: dict[str, float]
    plan_ms: tuple[float, float] | None
    decide_seconds: float
    hold_deciding_ms: float
    holds_deciding_ms: dict[str, float]

    @property
    def report_steps(self) -> float:
        """Steps in a report; 0 where there was none."""
        if not self.reports_per_second:
            return 0.0
        return self.ranks * self.wanted_per_second / self.reports_per_second

    @property
    def grown_mb(self) -> float:
        """Memory at the end beside that at half-time: until then the window fills."""
        return self.resident_mb[-1] - self.resident_mb[len(self.resident_mb) // 2]

    @property
    def longest_hold_ms(self) -> float:
        """Of the event loop, deciding or not, by CPU."""
        return max(self.hold_ms, self.hold_deciding_ms)
