"""Advice from replays of several settings: the verdict, the settings to use, and the gain of each layer.

All replays score the same steps, so the figures of a setting are the same in every table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eplb_core.placement import Float64, mean_par
from eplb_core.planner.settings import AUTO, NumberOrAuto, PlannerSettings
from eplb_core.solver.window import standard_error
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for
from eplb_service.replay.policy import Job, ReplayError, Setup
from eplb_service.replay.result import Replay, Score

MOVE_PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)
"""Prices of moves that the curve of balance against moves is drawn with."""
SAME_TIME = 0.01
"""Part of the time by which a setting must be faster to be worth more slots or moves."""
_PRICES = {f"price {price:g}": price for price in MOVE_PRICES}
_FREE = ", free moves"
"""Suffix of the label of a job without a price of moves."""
_SAME_PAR = 0.01
"""Peak-to-average ratios that are nearer than this part of the best are taken for equal: the cheaper setting wins."""
_SURE_ERRORS = 2.0
"""Standard errors of the difference within which ratios are taken for equal."""
_MIN_ROWS = 4
"""Intervals below which that error is not known."""
_WORTH_MEMORY = 0.1
"""Part of what balancing can win that a setting must win beyond another to be worth more slots (no cost curve)."""
_READING_TOKENS = 128.0
"""Mean tokens of an expert below which most devices only wait for weights: the shipped curves' knees are 100 to 150."""
_WORTH_IT = 0.03
"""Peak-to-average ratio that balancing must win to be worth running."""


@dataclass(frozen=True)
class Option:
    """One setting tried: its name, its slots per rank, schedule and price of moves, and what it realised.

    ``moved_per_100_steps`` is the share of all slots that receive weights; ``moe_ms`` are the slowest ranks of all
    layers in a step, ``None`` without a cost curve; ``net_ms`` is ``None`` unless what experts take is stated;
    ``bytes_per_rank`` the weights of a rank's experts of all layers, 0 if an expert's are not known; ``par_D`` float64
    ``[D]`` what each interval realised.
    """

    label: str
    setup: Setup
    move_price: NumberOrAuto
    par: float
    moved_per_100_steps: float
    net_ms: float | None
    moe_ms: float | None = None
    bytes_per_rank: int = 0
    par_D: Float64 = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)


@dataclass(frozen=True)
class Advice:
    """Advice for a deployment.

    Parameters
    ----------
    pays
        True if balancing is worth running.
    share
        Fraction of the experts' time that the advised setting saves, net of switching if times are known.
    ranks_worth, ranks
        Saved expert time as a number of ranks, and the number of all ranks.
    redundant_bytes_per_rank
        Memory of the advised redundancy on each rank; 0 if an expert's bytes are unknown.
    net_ms
        Milliseconds saved per step, net of switching; ``None`` if neither a cost curve nor the step time is known.
    tokens_per_second, tokens_per_second_won
        Throughput without balancing, and its increase with the advised setting; ``None`` unless the step time and
        top-k are known.
    reasons
        Sentences that explain the verdict to an operator.
    par_left_alone, par, floor
        PAR without redundancy and balancing, PAR with the advised setting, and the sampling floor.
    redundant
        Advised number of redundant experts per layer.
    chosen
        The advised setting.
    by_redundancy, by_schedule, by_moves
        Settings of the curves. ``by_redundancy`` varies the slots under the advised schedule. ``by_schedule`` varies
        window and interval, and ``by_moves`` the price of moves, with the slots that the first round chose.
        ``by_moves`` is empty for a user's own policy function, which has no price of moves.
    gain_L
        PAR gain per layer of the advised setting over no balancing and no redundancy, float64 ``[L]``.
    moe_ms_left_alone
        Time per step of the layers' slowest ranks, without redundancy and balancing; ``None`` without a cost curve.
    """

    pays: bool
    share: float
    ranks_worth: float
    ranks: int
    redundant_bytes_per_rank: int
    net_ms: float | None
    tokens_per_second: float | None
    tokens_per_second_won: float | None
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
    tokens_per_step: float | None = None,
    tokens_per_expert: float | None = None,
    policy: str = "flashlb",
) -> Advice:
    """Try settings in three rounds: slots, then schedules and prices, then slots again with the best schedule.

    Parameters
    ----------
    run
        Function that replays the jobs of a round.
    slots
        Slots per rank to try.
    window, steps
        Window and interval of the first round, and the number of steps of the trace.
    settings
        Planner settings of all rounds.
    tokens_per_step
        Tokens per step of the model; ``None`` if unknown.
    tokens_per_expert
        Mean tokens of an expert per step, or ``None`` if unknown. If it is low, the advice warns that time may not
        follow tokens.
    policy
        Name of the policy to advise on.

    Raises
    ------
    ReplayError
        If a round was stopped.
    """

    def done(jobs: list[Job]) -> Replay:
        found = run(jobs)
        if found.interrupted:
            raise ReplayError("stopped before enough was known to advise anything")
        return found

    def jobs_of(setups: Sequence[Setup], price: NumberOrAuto = settings.move_price) -> list[Job]:
        return jobs_for([policy], setups, replace(settings, move_price=price), hindsight=False)

    def jobs_by_slots(schedule: Setup) -> list[Job]:
        """Return a job per number of slots, and one with free moves if the planner sets the price of moves."""
        jobs = jobs_of([replace(schedule, slots=count, start=start) for count in slots])
        if settings.move_price != AUTO or jobs[-1].external() is not None:
            return jobs
        free = replace(settings, move_price=0.0)
        return jobs + [Job.of(f"{job.label}{_FREE}", job.setup, policy, free) for job in jobs if job.policy]

    fewest = Setup(min(slots), window, window)
    start = max(setup.first for setup in (fewest, *_schedules(fewest, steps)))
    first = done(jobs_by_slots(fewest))
    alone = _left_alone(first)
    by_first = _without_losses(_options(first, alone, settings), first.costs)
    found = cheapest(by_first, alone.par)
    near = found.setup
    jobs = jobs_of([replace(setup, start=start) for setup in _schedules(near, steps)], found.move_price)
    same = [
        job.setup for job in jobs if (job.setup.window, job.setup.interval) == (near.window, near.interval)
    ]
    if jobs[-1].external() is None:
        jobs += [
            Job.of(label, (same or [jobs[0].setup])[0], policy, replace(settings, move_price=price))
            for label, price in _PRICES.items()
        ]
    second = _options(done(jobs), alone, replace(settings, move_price=found.move_price))
    by_schedule = [option for option in second if option.label not in _PRICES]
    calm = min(_near_best(by_schedule), key=lambda option: option.moved_per_100_steps).setup
    third = first
    if (calm.window, calm.interval) != (near.window, near.interval):
        third = done(jobs_by_slots(calm))
    alone = _left_alone(third)
    tried = _without_losses(_options(third, alone, settings), third.costs)
    chosen = cheapest(tried, alone.par)
    if chosen.setup.slots > found.setup.slots:
        # Keep the first round's schedule: the other one needs more slots, and so more memory.
        third = first
        tried = by_first
        chosen = found
    schedules = _distinct([option for option in second if option.label not in _PRICES], calm)
    prices = _distinct([option for option in second if option.label in _PRICES])
    return _advice(
        third, chosen, _one_per_slots(tried, chosen), schedules, prices, tokens_per_step, tokens_per_expert
    )


def _advice(
    replay: Replay,
    chosen: Option,
    by_redundancy: Sequence[Option],
    by_schedule: tuple[Option, ...],
    by_moves: tuple[Option, ...],
    tokens_per_step: float | None,
    tokens_per_expert: float | None,
) -> Advice:
    """Return the advice to deploy ``chosen``, a setting of ``replay``, with the curves."""
    alone = _left_alone(replay)
    replayed = next(policy for policy in replay.policies if policy.label == chosen.label)
    score = replay.score(replayed)
    pays, reasons = _judged(replay.costs, alone, score, chosen)
    reasons += _reading_warnings(replay, tokens_per_expert)
    baseline = min(replay.baselines, key=lambda baseline: baseline.setup.slots)
    share, net_ms = _saved(replay, alone, score, chosen)
    rate = None
    if tokens_per_step is not None and replay.costs.step_ms:
        rate = 1e3 * tokens_per_step / replay.costs.step_ms
    won = None if rate is None or net_ms is None else rate * net_ms / (replay.costs.step_ms - net_ms)
    return Advice(
        pays=pays,
        share=share,
        ranks_worth=share * replay.ranks,
        ranks=replay.ranks,
        redundant_bytes_per_rank=_redundant_bytes(replay, chosen.setup.slots),
        net_ms=net_ms,
        tokens_per_second=rate,
        tokens_per_second_won=won,
        reasons=tuple(reasons),
        par_left_alone=alone.par,
        par=score.par,
        floor=score.floor,
        redundant=chosen.setup.slots * replay.ranks - replay.experts,
        chosen=chosen,
        by_redundancy=tuple(by_redundancy),
        by_schedule=by_schedule,
        by_moves=by_moves,
        gain_L=baseline.par_realised_L - replayed.par_realised_L,
        moe_ms_left_alone=alone.moe_ms,
    )


def _saved(replay: Replay, alone: Score, score: Score, chosen: Option) -> tuple[float, float | None]:
    """Return the part of the experts' time that is saved, and the milliseconds of a step if times are known."""
    share = 1.0 - score.par / alone.par
    if chosen.net_ms is None:
        return share, None
    if alone.moe_ms is not None:
        return chosen.net_ms / alone.moe_ms, chosen.net_ms
    experts_ms = replay.layers * replay.costs.layer_ms
    return (chosen.net_ms / experts_ms, chosen.net_ms) if replay.costs.step_ms else (share, None)


def _reading_warnings(replay: Replay, tokens_per_expert: float | None) -> list[str]:
    """Return the cost of a slot under a cost curve, or a warning that time may not follow so few tokens."""
    curve = replay.costs.curve
    if curve is None:
        if tokens_per_expert is None or tokens_per_expert >= _READING_TOKENS:
            return []
        return [
            f"An expert gets {tokens_per_expert:.0f} tokens in a step on average. Up to 100 or 200, a device takes no "
            "longer than for one, because reading the weights dominates, and a redundant slot adds a read. Use --gpu "
            "with --model, or --cost-curve, to estimate the time that balancing saves."
        ]
    if curve.linear:
        return []
    slot_bytes = replay.layers * replay.costs.bytes_per_expert
    memory = f", and {slot_bytes / 1e9:.2f} GB of a rank's memory" if slot_bytes else ""
    warning = f"Each slot that gets tokens takes {curve.read_us:.1f} us per layer and step to read its weights{memory}."
    if tokens_per_expert is not None and tokens_per_expert < curve.knee_tokens:
        warning += (
            f" An expert gets {tokens_per_expert:.0f} tokens in a step on average; up to {curve.knee_tokens:.0f} it "
            "takes no longer than for one, so balancing tokens hardly shortens such steps."
        )
    return [warning]


def _redundant_bytes(replay: Replay, slots: int) -> int:
    """Return the bytes of the redundant slots on each rank."""
    least = -(-replay.experts // replay.ranks)
    return replay.layers * (slots - least) * replay.costs.bytes_per_expert


def _distinct(options: Sequence[Option], kept: Setup | None = None) -> tuple[Option, ...]:
    """Drop settings with the same result as an earlier one. ``kept`` is preferred over its equals."""

    def figures(option: Option) -> tuple[object, ...]:
        return round(option.par, 3), round(option.moved_per_100_steps, 3), option.moe_ms

    shown: dict[tuple[object, ...], Option] = {}
    for option in options:
        if figures(option) not in shown or option.setup == kept:
            shown[figures(option)] = option
    return tuple(shown.values())


def cheapest(options: Sequence[Option], left_alone: float = 1.0) -> Option:
    """Return the option with the fewest slots that comes near the best time, or near the best PAR without a cost curve.

    ``left_alone`` is the PAR without redundancy and balancing: more slots are memory, so they must gain a part of what
    can be gained at all, and not just any hundredth.
    """
    gained = left_alone - min(option.par for option in options)
    return min(_near_best(options, _WORTH_MEMORY * gained), key=lambda option: option.setup.slots)


def _near_best(options: Sequence[Option], within: float = 0.0) -> list[Option]:
    """Return the options whose time, or PAR without a cost curve, is near the best.

    Near is one percent, ``within`` if that is more, or what may be chance.
    """
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(options, key=lambda option: option.par)
    return [
        option
        for option in options
        if option.par - best.par <= max(_SAME_PAR * best.par, within, _SURE_ERRORS * _error(option, best))
    ]


def _error(one: Option, other: Option) -> float:
    """Return the standard error of the difference of two options' PARs; 0 if their intervals cannot be compared."""
    if one.par_D.size != other.par_D.size or one.par_D.size < _MIN_ROWS:
        return 0.0
    difference_D = one.par_D - other.par_D
    return standard_error(difference_D[~np.isnan(difference_D)])


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


def _without_losses(options: Sequence[Option], costs: Costs) -> list[Option]:
    """Drop settings whose free moves cost more time than they save, if times are known. Priced moves stay first.

    If the price of the first moves alone keeps a layer from changing, free moves may gain as much as another slot per
    rank, and they take no memory.
    """
    timed = costs.curve is not None or bool(costs.step_ms)
    priced = {option.setup: option.net_ms or 0.0 for option in options if not option.label.endswith(_FREE)}
    return [option for option in options if not timed or (option.net_ms or 0.0) >= priced[option.setup]]


def _one_per_slots(options: Sequence[Option], chosen: Option) -> list[Option]:
    """Return ``chosen``, and an option with priced moves for each other number of slots."""
    by_slots: dict[int, Option] = {}
    for option in options:
        by_slots.setdefault(option.setup.slots, option)
    return [chosen if slots == chosen.setup.slots else option for slots, option in by_slots.items()]


def _options(replay: Replay, alone: Score, settings: PlannerSettings) -> list[Option]:
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
                move_price=_price(policy.label, settings),
                par=score.par,
                moved_per_100_steps=replay.moved_per_100_steps(policy),
                net_ms=None if saved_ms is None else saved_ms - score.stall_ms,
                moe_ms=score.moe_ms,
                bytes_per_rank=replay.layers * policy.setup.slots * replay.costs.bytes_per_expert,
                par_D=mean_par(policy.par_DL, axis=1),
            )
        )
    return options


def _price(label: str, settings: PlannerSettings) -> NumberOrAuto:
    return 0.0 if label.endswith(_FREE) else _PRICES.get(label, settings.move_price)


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
