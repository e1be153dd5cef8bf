"""Advice from replays of several settings: what to set, what each layer wins, and whether balancing pays at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eplb_service.placement import Float64
from eplb_service.planner.settings import NumberOrAuto, PlannerSettings
from eplb_service.replay.jobs import UNSPLIT, jobs_for
from eplb_service.replay.policy import Job, ReplayError, Setup
from eplb_service.replay.result import PolicyReplay, Replay, Score

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
    choices_per_step: float,
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
    choices_per_step
        Mean choices of experts in a step and layer.

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

    setups = [Setup(count, window, window) for count in slots]
    first = done([job for job in _jobs(setups, settings) if not job.label.startswith(UNSPLIT)])
    alone = _left_alone(first)
    near = cheapest(_options(first, alone), alone.par).setup
    second = done(_second_jobs(near, steps, settings))
    calm = _calmest(_schedules(_options(second, alone))).setup
    third = done(_jobs([Setup(count, calm.window, calm.interval) for count in slots], settings))
    return _put_together(second, third, settings, choices_per_step)


def cheapest(options: Sequence[Option], left_alone: float = 1.0) -> Option:
    """The fewest slots that come near the best time; near what is won by the best PAR where there is no cost curve.

    ``left_alone`` is the PAR without redundancy and balancing: more slots are memory, so they must win a part of what
    can be won at all, and not just any hundredth.
    """
    won = left_alone - min(option.par for option in options)
    near = _near_best(options, max(_SAME_PAR, _WORTH_MEMORY * won))
    return min(near, key=lambda option: option.setup.slots)


def _calmest(options: Sequence[Option]) -> Option:
    """The fewest moves per step that come near the best time, or PAR."""
    near = _near_best(options, _SAME_PAR)
    return min(near, key=lambda option: option.moves_per_decision / option.setup.interval)


def _near_best(options: Sequence[Option], within: float) -> list[Option]:
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(option.par for option in options)
    return [option for option in options if option.par <= best + within]


def _jobs(setups: Sequence[Setup], settings: PlannerSettings) -> list[Job]:
    return jobs_for(["flashlb"], setups, settings, hindsight=False)


def _second_jobs(near: Setup, steps: int, settings: PlannerSettings) -> list[Job]:
    """Other schedules and other prices of moves, with the slots that the first round speaks for."""
    windows, intervals = (
        sorted({max(1, count // 4), count, 2 * count}) for count in (near.window, near.interval)
    )
    setups = [
        Setup(near.slots, window, interval)
        for window in windows
        for interval in intervals
        if 3 * window < steps and 2 * interval < steps
    ]
    jobs = _jobs(setups or [near], settings)
    same = [
        job.setup for job in jobs if (job.setup.window, job.setup.interval) == (near.window, near.interval)
    ]
    setup = (same or [jobs[0].setup])[0]
    for label, price in _PRICES.items():
        jobs.append(Job.of(label, setup, "flashlb", replace(settings, move_price=price)))
    return jobs


def _left_alone(replay: Replay) -> Score:
    """Score of doing nothing on the fewest slots: no redundancy, no balancing."""
    fewest = min(replay.policies, key=lambda policy: policy.setup.slots)
    return replay.score(replay.baseline(fewest.setup))


def _options(replay: Replay, alone: Score) -> list[Option]:
    """Settings tried with what each realised, but those by tables beside a stepwise split."""
    return [
        _option(replay, policy, alone) for policy in replay.policies if not policy.label.startswith(UNSPLIT)
    ]


def _schedules(tried: Sequence[Option]) -> list[Option]:
    return [option for option in tried if option.label not in _PRICES]


def _option(replay: Replay, policy: PolicyReplay, alone: Score) -> Option:
    score, slots = replay.score(policy), policy.setup.slots
    saved_ms = replay.costs.saved_ms(replay.layers, score.par, alone.par)
    if score.moe_ms is not None and alone.moe_ms is not None:
        saved_ms = alone.moe_ms - score.moe_ms
    return Option(
        label=policy.label,
        setup=policy.setup,
        move_price=_PRICES.get(policy.label, 0.0),
        par=score.par,
        moves_per_decision=policy.moves_per_decision,
        moved_share=policy.moves_per_decision / (replay.layers * replay.ranks * slots),
        net_ms=saved_ms - score.stall_ms,
        moe_ms=score.moe_ms,
        bytes_per_rank=replay.layers * slots * replay.costs.bytes_per_expert,
    )


def _put_together(
    second: Replay, third: Replay, settings: PlannerSettings, choices_per_step: float
) -> Advice:
    alone = _left_alone(third)
    by_redundancy, tried = _options(third, alone), _options(second, alone)
    chosen = cheapest(by_redundancy, alone.par)
    replayed = next(policy for policy in third.policies if policy.label == chosen.label)
    score = third.score(replayed)
    pays, reasons = _judged(third, alone, score, chosen, choices_per_step)
    if alone.moe_ms is not None and chosen.moe_ms is not None:
        pays, in_time = _judged_in_time(alone.moe_ms, chosen, score.stall_ms)
        reasons = [in_time, *reasons[:1], *_reasons_of_split(third, chosen)]
    elif pays:
        reasons += _reasons_of_memory(third, by_redundancy, chosen)
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
        by_schedule=tuple(_schedules(tried)),
        by_moves=tuple(option for option in tried if option.label in _PRICES),
        gain_L=fewest.par_realised_L - replayed.par_realised_L,
        moe_ms_left_alone=alone.moe_ms,
    )


def _judged(
    replay: Replay, alone: Score, score: Score, chosen: Option, choices_per_step: float
) -> tuple[bool, list[str]]:
    """Verdict on whether balancing pays by the peak-to-average ratio and the stated times, and why."""
    won, avoidable = alone.par - score.par, alone.par - score.floor
    per_rank, step_ms = choices_per_step / replay.ranks, replay.costs.step_ms
    reasons = [
        f"PAR goes from {alone.par:.3f} to {score.par:.3f}; token sampling alone leaves about {score.floor:.3f}."
    ]
    pays = won >= _WORTH_IT
    if avoidable < _WORTH_IT:
        reasons.append("The ranks are already as even as token sampling lets them be.")
    elif not pays:
        reasons.append(
            "The heat moves faster than placements can follow: what is fitted on a window does not last."
        )
    if score.floor - 1 > 0.5 * (alone.par - 1):
        reasons.append(
            f"A rank gets only {per_rank:.0f} tokens per layer and step: chance makes most of the imbalance, and no "
            "placement helps against it. Larger batches would."
        )
    if replay.experts / replay.ranks <= _FEW_EXPERTS:
        reasons.append(
            f"A rank has only {replay.experts / replay.ranks:g} of the model's experts: there is little to exchange, "
            "only redundancy helps."
        )
    if step_ms and chosen.net_ms <= 0:
        pays = False
        reasons.append(f"Switching costs as much as balance wins: {chosen.net_ms:.3f} ms of a step, net.")
    elif step_ms:
        reasons.append(f"That is {chosen.net_ms:.2f} ms of a step of {step_ms:g} ms, net of switching.")
    return pays, reasons


def _judged_in_time(left_alone_ms: float, chosen: Option, stall_ms: float) -> tuple[bool, str]:
    """Verdict on whether balancing pays by the cost curve, and why; ``stall_ms`` is what switches take of a step."""
    assert chosen.moe_ms is not None
    pays = chosen.net_ms > SAME_TIME * left_alone_ms
    return pays, (
        f"The slowest ranks of all layers take {chosen.moe_ms:.3f} ms of a step, left alone {left_alone_ms:.3f} ms; "
        f"switching costs {stall_ms:.3f} ms of it: {chosen.net_ms:+.3f} ms ({chosen.net_ms / left_alone_ms:+.1%}), net."
    )


def _reasons_of_split(replay: Replay, chosen: Option) -> list[str]:
    """Sentence on whether the stepwise split pays in the setting advised; nothing where steps are not split."""
    cost = replay.costs.split
    unsplit = [
        policy.moe_ms
        for policy in replay.policies
        if policy.label.startswith(UNSPLIT) and policy.setup == chosen.setup
    ]
    if cost is None or not unsplit or unsplit[0] is None or chosen.moe_ms is None:
        return []
    won = unsplit[0] - chosen.moe_ms
    return [
        f"Of that the stepwise split itself takes {cost.ms_of_step(replay.layers):.3f} ms. By tables, without it, "
        f"{unsplit[0]:.3f} ms: the split {'pays' if won > 0 else 'does not pay'} ({won:+.3f} ms)."
    ]


def _reasons_of_memory(replay: Replay, options: Sequence[Option], chosen: Option) -> list[str]:
    """Memory that the slots advised take, and what more of them would win for what they take."""

    def memory(option: Option) -> str:
        more = option.setup.slots * replay.ranks / replay.experts - 1
        known = f" ({option.bytes_per_rank / 2**30:.2f} GiB per rank)" if option.bytes_per_rank else ""
        return f"{more:.0%} more memory for experts than without any{known}"

    redundant = chosen.setup.slots * replay.ranks - replay.experts
    said = [f"{redundant} redundant experts take {memory(chosen)}."] if redundant else []
    best = min(options, key=lambda option: option.par)
    if best.setup.slots > chosen.setup.slots:
        more = best.setup.slots * replay.ranks - replay.experts
        in_ms = f", {best.net_ms - chosen.net_ms:.2f} ms" if replay.costs.step_ms else ""
        said.append(f"{more} would win another {chosen.par - best.par:.3f}{in_ms}, and take {memory(best)}.")
    return said
