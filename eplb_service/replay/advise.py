"""Advice from replays of several settings: what to set, what each layer wins, and whether balancing pays at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eplb_service.placement import Float64
from eplb_service.planner.settings import NumberOrAuto, PlannerSettings
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for
from eplb_service.replay.policy import Job, ReplayError, Setup
from eplb_service.replay.result import Replay, Score

MOVE_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Prices of moves that the curve of balance against moves is drawn with."""
SAME_TIME = 0.005
"""Part of the time by which a setting must be faster to be worth more slots or moves."""
_PRICES = {f"price {price:g}": price for price in MOVE_PRICES}
_SAME_PAR = 0.01
"""Peak-to-average ratios this near are taken for equal: the cheaper setting wins."""
_WORTH_MEMORY = 0.1
"""Part of what balancing can win that a setting must win beyond another to be worth more slots (no cost curve)."""
_WORTH_IT = 0.03
"""Peak-to-average ratio that balancing must win to be worth running."""


@dataclass(frozen=True)
class Option:
    """One setting tried: its name, its slots per rank, schedule and price of moves, and what it realised.

    ``moved_per_100_steps`` is the share of all slots that receive weights; ``moe_ms`` are the slowest ranks of all
    layers in a step, ``None`` without a cost curve; ``net_ms`` is ``None`` unless what experts take is stated;
    ``bytes_per_rank`` the weights of a rank's experts of all layers, 0 where an expert's are not known.
    """

    label: str
    setup: Setup
    move_price: NumberOrAuto
    par: float
    moved_per_100_steps: float
    net_ms: float | None
    moe_ms: float | None = None
    bytes_per_rank: int = 0


@dataclass(frozen=True)
class Advice:
    """Advice for a deployment.

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


def advise(
    run: Callable[[list[Job]], Replay],
    slots: Sequence[int],
    window: int,
    steps: int,
    settings: PlannerSettings,
) -> Advice:
    """Try settings in three rounds, each by what the one before found: slots, schedules and prices, slots again.

    Parameters
    ----------
    run
        Replays the jobs of a round.
    slots
        Slots per rank that are tried.
    window, steps
        Window and interval of the first round, and steps of the trace.
    settings
        What all rounds have in common.

    Raises
    ------
    ReplayError
        Where a round was stopped.
    """

    def done(jobs: list[Job]) -> Replay:
        found = run(jobs)
        if found.interrupted:
            raise ReplayError("stopped before enough was known to advise anything")
        return found

    def jobs_of(setups: Sequence[Setup]) -> list[Job]:
        return jobs_for(["flashlb"], setups, settings, hindsight=False)

    first = done(jobs_of([Setup(count, window, window) for count in slots]))
    alone = _left_alone(first)
    near = cheapest(_options(first, alone), alone.par).setup
    jobs = jobs_of(_schedules(near, steps))
    same = [
        job.setup for job in jobs if (job.setup.window, job.setup.interval) == (near.window, near.interval)
    ]
    jobs += [
        Job.of(label, (same or [jobs[0].setup])[0], "flashlb", replace(settings, move_price=price))
        for label, price in _PRICES.items()
    ]
    second = _options(done(jobs), alone)
    by_schedule = [option for option in second if option.label not in _PRICES]
    calm = min(_near_best(by_schedule, _SAME_PAR), key=lambda option: option.moved_per_100_steps).setup
    third = done(jobs_of([Setup(count, calm.window, calm.interval) for count in slots]))
    alone = _left_alone(third)
    by_redundancy = _options(third, alone)
    chosen = cheapest(by_redundancy, alone.par)
    replayed = next(policy for policy in third.policies if policy.label == chosen.label)
    score = third.score(replayed)
    pays, reasons = _judged(third.costs, alone, score, chosen)
    fewest = min(third.baselines, key=lambda baseline: baseline.setup.slots)
    return Advice(
        pays=pays,
        reasons=tuple(reasons),
        par_left_alone=alone.par,
        par=score.par,
        floor=score.floor,
        redundant=chosen.setup.slots * third.ranks - third.experts,
        chosen=replace(chosen, move_price=settings.move_price),
        by_redundancy=tuple(by_redundancy),
        by_schedule=tuple(by_schedule),
        by_moves=tuple(option for option in second if option.label in _PRICES),
        gain_L=fewest.par_realised_L - replayed.par_realised_L,
        moe_ms_left_alone=alone.moe_ms,
    )


def cheapest(options: Sequence[Option], left_alone: float = 1.0) -> Option:
    """The fewest slots that come near the best time; near what is won by the best PAR where there is no cost curve.

    ``left_alone`` is the PAR without redundancy and balancing: more slots are memory, so they must win a part of what
    can be won at all, and not just any hundredth.
    """
    won = left_alone - min(option.par for option in options)
    near = _near_best(options, max(_SAME_PAR, _WORTH_MEMORY * won))
    return min(near, key=lambda option: option.setup.slots)


def _near_best(options: Sequence[Option], within: float) -> list[Option]:
    """Options whose time, or PAR without a cost curve, is near the best."""
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(option.par for option in options)
    return [option for option in options if option.par <= best + within]


def _schedules(near: Setup, steps: int) -> list[Setup]:
    """Shorter and longer windows and intervals with the same slots, as far as the trace has steps for them."""
    counts = sorted({max(1, near.window // 4), near.window, 2 * near.window})
    return [
        Setup(near.slots, window, interval)
        for window in counts
        for interval in counts
        if 3 * window < steps and 2 * interval < steps
    ] or [near]


def _left_alone(replay: Replay) -> Score:
    """Score of doing nothing on the fewest slots: no redundancy, no balancing."""
    fewest = min(replay.baselines, key=lambda baseline: baseline.setup.slots)
    return replay.score(fewest)


def _options(replay: Replay, alone: Score) -> list[Option]:
    """Settings tried with what each realised, beside doing nothing without redundancy."""
    options = []
    for policy in replay.policies:
        score = replay.score(policy)
        saved_ms = replay.costs.saved_ms(replay.layers, score.par, alone.par)
        if score.moe_ms is not None and alone.moe_ms is not None:
            saved_ms = alone.moe_ms - score.moe_ms
        options.append(
            Option(
                label=policy.label,
                setup=policy.setup,
                move_price=_PRICES.get(policy.label, 0.0),
                par=score.par,
                moved_per_100_steps=replay.moved_per_100_steps(policy),
                net_ms=None if saved_ms is None else saved_ms - score.stall_ms,
                moe_ms=score.moe_ms,
                bytes_per_rank=replay.layers * policy.setup.slots * replay.costs.bytes_per_expert,
            )
        )
    return options


def _judged(costs: Costs, alone: Score, score: Score, chosen: Option) -> tuple[bool, list[str]]:
    """Verdict on whether what is chosen pays, by the cost curve or else by PAR and the stated times, and why."""
    pays = alone.par - score.par >= _WORTH_IT
    reasons = [
        f"PAR goes from {alone.par:.3f} to {score.par:.3f}; token sampling alone leaves about {score.floor:.3f}."
    ]
    step_ms = costs.step_ms
    if alone.moe_ms is not None and chosen.moe_ms is not None and chosen.net_ms is not None:
        return chosen.net_ms > SAME_TIME * alone.moe_ms, [
            f"By the cost curve, the slowest ranks of all layers take {chosen.moe_ms:.3f} ms of a step, left alone "
            f"{alone.moe_ms:.3f} ms; "
            f"switching costs {score.stall_ms:.3f} ms of it: {chosen.net_ms:+.3f} ms net.",
            *reasons,
        ]
    if alone.par - score.floor < _WORTH_IT:
        reasons.append("The ranks are already as even as token sampling lets them be.")
    elif not pays:
        reasons.append(
            "The heat moves faster than placements can follow: what is fitted on a window does not last."
        )
    if score.floor - 1 > 0.5 * (alone.par - 1):
        reasons.append(
            "A rank gets so few tokens per layer and step that chance makes most of the imbalance: no placement helps "
            "against it. Larger batches would."
        )
    estimate = costs.estimate_text(score.par, alone.par)
    if estimate is not None:
        reasons.append(f"{estimate[0].upper()}{estimate[1:]}. --layer-ms or --cost-curve give a figure.")
    elif step_ms and chosen.net_ms is not None and chosen.net_ms <= 0:
        pays = False
        reasons.append(f"Switching costs as much as balance wins: {chosen.net_ms:.3f} ms of a step, net.")
    elif step_ms:
        reasons.append(
            f"By the stated layer_ms that is {chosen.net_ms:.2f} ms of a step of {step_ms:g} ms, net of switching."
        )
    return pays, reasons
