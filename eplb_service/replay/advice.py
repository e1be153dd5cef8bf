"""From replays of several settings to advice: what to set, what it wins layer by layer, and whether it pays at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eplb_service.placement import Float64
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.advice_options import Option, calmest, cheapest, left_alone_of, options_of
from eplb_service.replay.advice_reasons import judged, judged_in_time, reasons_of_memory, reasons_of_split
from eplb_service.replay.jobs import Job
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import UNSPLIT, jobs_for
from eplb_service.replay.schedule import ReplayError, Schedule

MOVE_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Prices of moves that the curve of balance against moves is drawn with."""
_PRICES = {f"price {price:g}": price for price in MOVE_PRICES}


@dataclass(frozen=True)
class Advice:
    """What to do with a deployment.

    Parameters
    ----------
    pays
        Whether balancing is worth running.
    reasons
        Why, for an operator to read.
    par_left_alone, par, floor
        Without redundancy and balancing; as advised; by sampling alone.
    redundant
        Redundant experts per layer that are advised.
    chosen
        The setting advised.
    by_redundancy, by_schedule, by_moves
        The curves: settings that differ in redundancy, under the schedule advised; in window and interval, and in the
        price of moves, with the slots that the first round spoke for.
    gain_L
        PAR that each layer wins as advised over being left alone without redundancy, float64 ``[L]``.
    moe_ms_left_alone
        The slowest ranks of all layers in a step, without redundancy and balancing; ``None`` without a cost curve.
    """

    pays: bool
    reasons: tuple[str, ...]
    par_left_alone: float
    par: float
    floor: float
    redundant: int
    chosen: Option
    by_redundancy: tuple[Option, ...]
    by_schedule: tuple[Option, ...]
    by_moves: tuple[Option, ...]
    gain_L: Float64
    moe_ms_left_alone: float | None = None


def first_jobs(slots: Sequence[int], schedule: Schedule, settings: PlannerSettings) -> list[Job]:
    """The first round: flashlb with each number of slots."""
    jobs = jobs_for(["flashlb"], [Setup(count, schedule) for count in slots], settings, hindsight=False)
    return [job for job in jobs if not job.label.startswith(UNSPLIT)]


def second_jobs(first: Replay, steps: int, settings: PlannerSettings) -> list[Job]:
    """The second round, with the slots that the first one speaks for: other schedules, other prices of moves."""
    left_alone, _ = left_alone_of(first)
    setup = cheapest(options_of(first, {}, left_alone), left_alone.par).setup
    window, interval = setup.schedule.window, setup.schedule.interval
    windows = sorted({max(1, window // 4), window, 2 * window})
    intervals = sorted({max(1, interval // 4), interval, 2 * interval})
    setups = [
        Setup(setup.slots, Schedule(other_window, other_interval))
        for other_window in windows
        for other_interval in intervals
        if 3 * other_window < steps and 2 * other_interval < steps
    ]
    jobs = jobs_for(["flashlb"], setups or [setup], settings, hindsight=False)
    same = next((job.setup for job in jobs if _alike(job.setup.schedule, setup.schedule)), jobs[0].setup)
    for price in MOVE_PRICES:
        policy = Policy.of("flashlb", replace(settings, move_price=price))
        jobs.append(Job(f"price {price:g}", same, policy))
    return jobs


def third_jobs(first: Replay, second: Replay, slots: Sequence[int], settings: PlannerSettings) -> list[Job]:
    """The third round: each number of slots again, under the schedule that the second one speaks for."""
    left_alone, _ = left_alone_of(first)
    schedule = calmest(_schedules(options_of(second, _PRICES, left_alone))).setup.schedule
    return jobs_for(["flashlb"], [Setup(count, schedule) for count in slots], settings, hindsight=False)


def advise(
    first: Replay, second: Replay, third: Replay, settings: PlannerSettings, choices_per_step: float
) -> Advice:
    """Put all rounds together.

    Parameters
    ----------
    first, second, third
        The rounds' replays, in their order.
    settings
        What they had in common.
    choices_per_step
        Mean choices of experts in a step and layer.

    Raises
    ------
    ReplayError
        Where a round was stopped.
    """
    if first.interrupted or second.interrupted or third.interrupted:
        raise ReplayError("stopped before enough was known to advise anything")
    left_alone, left_alone_L = left_alone_of(third)
    by_redundancy = options_of(third, {}, left_alone)
    tried = options_of(second, _PRICES, left_alone)
    chosen = cheapest(by_redundancy, left_alone.par)
    replayed = next(policy for policy in third.policies if policy.label == chosen.label)
    score = third.score(replayed)
    pays, reasons = judged(third, left_alone.par, score.par, score.floor, chosen, choices_per_step)
    if left_alone.moe_ms is not None and chosen.moe_ms is not None:
        pays, in_time = judged_in_time(left_alone.moe_ms, chosen, score.stall_ms)
        reasons = [in_time, *reasons[:1], *reasons_of_split(third, chosen)]
    elif pays:
        reasons += reasons_of_memory(third, by_redundancy, chosen)
    return Advice(
        pays=pays,
        reasons=tuple(reasons),
        par_left_alone=left_alone.par,
        par=score.par,
        floor=score.floor,
        redundant=chosen.setup.slots * third.ranks - third.experts,
        chosen=replace(chosen, move_price=settings.move_price),
        by_redundancy=tuple(by_redundancy),
        by_schedule=tuple(_schedules(tried)),
        by_moves=tuple(option for option in tried if option.label in _PRICES),
        gain_L=left_alone_L - replayed.par_realised_L,
        moe_ms_left_alone=left_alone.moe_ms,
    )


def _schedules(tried: Sequence[Option]) -> list[Option]:
    return [option for option in tried if option.label not in _PRICES]


def _alike(one: Schedule, other: Schedule) -> bool:
    return (one.window, one.interval) == (other.window, other.interval)
