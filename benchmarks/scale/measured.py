"""What one run of the load generator found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """How long single callbacks have held the event loop in one part of a run.

    Parameters
    ----------
    cpu_ms, wall_ms
        The longest, in milliseconds of its thread's CPU, and by the clock: that also counts its waits for a core, on a
        machine that has more to do than this.
    named
        The longest by CPU, by what was called.
    still_ms
        Longest that a virtual processor was not run within one, which the system takes for the thread's CPU, and
        ``cpu_ms`` leaves out.
    """

    cpu_ms: float
    wall_ms: float
    named: dict[str, float]
    still_ms: float = 0.0


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
    joining, holding, deciding
        How long the event loop was held: while the ranks joined and reports grew to their length, over the measurement,
        and while a plan was made and sent.
    long_holds
        Callbacks that took over 20 ms of CPU over the measurement.
    plan_ms
        From the offer of a plan until the first rank, and the last, has it; ``None`` where none was made, or a rank
        never got it.
    decide_seconds
        That the decision before it took.
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
    joining: Held
    holding: Held
    deciding: Held
    long_holds: int
    plan_ms: tuple[float, float] | None
    decide_seconds: float

    @property
    def report_steps(self) -> float:
        """Steps in a report; 0 where there was none."""
        if not self.reports_per_second:
            return 0.0
        return self.ranks * self.wanted_per_second / self.reports_per_second

    @property
    def made_steps(self) -> float:
        """Steps that the ranks made over the measurement."""
        return self.wanted_per_second * self.seconds

    @property
    def grown_mb(self) -> float:
        """Memory at the end beside that at half-time: until then the window fills."""
        return self.resident_mb[-1] - self.resident_mb[len(self.resident_mb) // 2]

    @property
    def longest_hold_ms(self) -> float:
        """Of the event loop from the first rank to the last plan, by CPU."""
        return max(part.cpu_ms for part in (self.joining, self.holding, self.deciding))

    @property
    def stood_still_ms(self) -> float:
        """The longest that a virtual processor was not run while something held the loop."""
        return max(part.still_ms for part in (self.joining, self.holding, self.deciding))
