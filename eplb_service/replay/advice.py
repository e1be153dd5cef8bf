"""From replays of several settings to advice: what to set, what it wins layer by layer, and whether it pays at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eplb_service.placement import Float64, mean_par
from eplb_service.planner.settings import NumberOrAuto, PlannerSettings
from eplb_service.replay.jobs import Job
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import PolicyReplay, Setup, weighted
from eplb_service.replay.result import Replay
from eplb_service.replay.runner import UNSPLIT, jobs_for
from eplb_service.replay.schedule import ReplayError, Schedule

MOVE_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Prices of moves that the curve of balance against moves is drawn with."""

SAME_TIME = 0.005
"""Part of the time by which a setting must be faster to be worth more slots or moves."""
_SAME_PAR = 0.01
"""Peak-to-average ratios this near are taken for equal: the cheaper setting wins."""
_WORTH_IT = 0.03
"""Peak-to-average ratio that balancing must win to be worth running."""
_FEW_EXPERTS = 2
"""Experts per rank at which there is next to nothing to exchange."""


@dataclass(frozen=True)
class Option:
    """One setting tried: its name, its slots per rank, schedule and price of moves, and what it realised.

    ``moe_ms`` are the slowest ranks of all layers in a step, ``None`` without a cost curve; ``bytes_per_rank`` the
    weights of a rank's experts of all layers, 0 where an expert's are not known.
    """

    label: str
    setup: Setup
    move_price: NumberOrAuto
    par: float
    moves_per_decision: float
    moved_share: float
    net_ms: float
    moe_ms: float | None = None
    bytes_per_rank: int = 0


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
        The curves: settings that differ in redundancy, in window and interval, and in the price of moves.
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
    setup = cheapest(_options(first, {}, _LeftAlone(1.0, None))).setup
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


def advise(first: Replay, second: Replay, settings: PlannerSettings, choices_per_step: float) -> Advice:
    """Put both rounds together; raises ``ReplayError`` where either was stopped."""
    if first.interrupted or second.interrupted:
        raise ReplayError("stopped before enough was known to advise anything")
    prices = {f"price {price:g}": price for price in MOVE_PRICES}
    fewest = min(first.policies, key=lambda policy: policy.setup.slots)
    left_alone_L = weighted(first.baseline(fewest.setup).left_alone_DL, fewest.decisions)
    left_alone = _LeftAlone(float(mean_par(left_alone_L)), first.moe_ms_left_alone(fewest))
    by_redundancy = _options(first, {}, left_alone)
    tried = _options(second, prices, left_alone)
    by_moves = [option for option in tried if option.label in prices]
    by_schedule = [option for option in tried if option.label not in prices]
    chosen = _calmest(by_schedule)
    replayed = next(policy for policy in second.policies if policy.label == chosen.label)
    score = second.score(replayed)
    pays, reasons = _judged(second, left_alone.par, score.par, score.floor, chosen, choices_per_step)
    if left_alone.moe_ms is not None and chosen.moe_ms is not None:
        pays, in_time = _judged_in_time(left_alone.moe_ms, chosen, score.stall_ms)
        reasons = [in_time, *reasons[:1], *_of_split(second, chosen)]
    return Advice(
        pays=pays,
        reasons=tuple(reasons),
        par_left_alone=left_alone.par,
        par=score.par,
        floor=score.floor,
        redundant=chosen.setup.slots * second.ranks - second.experts,
        chosen=replace(chosen, move_price=settings.move_price),
        by_redundancy=tuple(by_redundancy),
        by_schedule=tuple(by_schedule),
        by_moves=tuple(by_moves),
        gain_L=left_alone_L - replayed.par_realised_L,
        moe_ms_left_alone=left_alone.moe_ms,
    )


def _judged(
    replay: Replay, left_alone: float, par: float, floor: float, chosen: Option, choices_per_step: float
) -> tuple[bool, list[str]]:
    won, avoidable = left_alone - par, left_alone - floor
    per_rank = choices_per_step / replay.ranks
    reasons = [f"PAR goes from {left_alone:.3f} to {par:.3f}; token sampling alone leaves about {floor:.3f}."]
    pays = won >= _WORTH_IT
    if avoidable < _WORTH_IT:
        reasons.append("The ranks are already as even as token sampling lets them be.")
    elif not pays:
        reasons.append(
            "The heat moves faster than placements can follow: what is fitted on a window does not last."
        )
    if floor - 1 > 0.5 * (left_alone - 1):
        reasons.append(
            f"A rank gets only {per_rank:.0f} tokens per layer and step: chance makes most of the imbalance, and no "
            "placement helps against it. Larger batches would."
        )
    if replay.experts / replay.ranks <= _FEW_EXPERTS:
        reasons.append(
            f"A rank has only {replay.experts / replay.ranks:g} of the model's experts: there is little to exchange, "
            "only redundancy helps."
        )
    if replay.costs.step_ms and chosen.net_ms <= 0:
        pays = False
        reasons.append(f"Switching costs as much as balance wins: {chosen.net_ms:.3f} ms of a step, net.")
    elif replay.costs.step_ms:
        reasons.append(
            f"That is {chosen.net_ms:.2f} ms of a step of {replay.costs.step_ms:g} ms, net of switching."
        )
    return pays, reasons


class _LeftAlone(NamedTuple):
    """What all settings are measured against: no redundancy, no balancing."""

    par: float
    moe_ms: float | None


def _judged_in_time(left_alone_ms: float, chosen: Option, stall_ms: float) -> tuple[bool, str]:
    assert chosen.moe_ms is not None
    pays = chosen.net_ms > SAME_TIME * left_alone_ms
    return pays, (
        f"The slowest ranks of all layers take {chosen.moe_ms:.3f} ms of a step, left alone {left_alone_ms:.3f} ms; "
        f"switching costs {stall_ms:.3f} ms of it: {chosen.net_ms:+.3f} ms ({chosen.net_ms / left_alone_ms:+.1%}), net."
    )


def _of_split(replay: Replay, chosen: Option) -> list[str]:
    """Whether the stepwise split pays in the setting advised; nothing where steps are not split."""
    cost = replay.costs.split
    unsplit = [
        policy
        for policy in replay.policies
        if policy.label.startswith(UNSPLIT) and policy.setup == chosen.setup
    ]
    if cost is None or not unsplit or unsplit[0].moe_ms is None or chosen.moe_ms is None:
        return []
    won = unsplit[0].moe_ms - chosen.moe_ms
    return [
        f"Of that the stepwise split itself takes {cost.ms_of_step(replay.layers):.3f} ms. By tables, without it, "
        f"{unsplit[0].moe_ms:.3f} ms: the split {'pays' if won > 0 else 'does not pay'} ({won:+.3f} ms)."
    ]


def _options(replay: Replay, prices: dict[str, float], left_alone: _LeftAlone) -> list[Option]:
    return [
        _option(replay, policy, prices.get(policy.label, 0.0), left_alone)
        for policy in replay.policies
        if not policy.label.startswith(UNSPLIT)
    ]


def _option(replay: Replay, policy: PolicyReplay, price: float, left_alone: _LeftAlone) -> Option:
    score = replay.score(policy)
    slots = replay.layers * replay.ranks * policy.setup.slots
    saved_ms = replay.costs.saved_ms(score.par, left_alone.par)
    if score.moe_ms is not None and left_alone.moe_ms is not None:
        saved_ms = left_alone.moe_ms - score.moe_ms
    return Option(
        label=policy.label,
        setup=policy.setup,
        move_price=price,
        par=score.par,
        moves_per_decision=policy.moves_per_decision,
        moved_share=policy.moves_per_decision / slots,
        net_ms=saved_ms - score.stall_ms,
        moe_ms=score.moe_ms,
        bytes_per_rank=replay.layers * policy.setup.slots * replay.costs.bytes_per_expert,
    )


def cheapest(options: Sequence[Option]) -> Option:
    """The fewest slots that come near the best time, or the best PAR where there is no cost curve."""
    return min(_near_best(options), key=lambda option: option.setup.slots)


def _calmest(options: Sequence[Option]) -> Option:
    """The fewest moves per step that come near the best time, or PAR."""
    return min(
        _near_best(options), key=lambda option: option.moves_per_decision / option.setup.schedule.interval
    )


def _near_best(options: Sequence[Option]) -> list[Option]:
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(option.par for option in options)
    return [option for option in options if option.par <= best + _SAME_PAR]


def _alike(one: Schedule, other: Schedule) -> bool:
    return (one.window, one.interval) == (other.window, other.interval)
