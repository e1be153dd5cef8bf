"""Replay several settings to recommend one, and to determine whether balancing pays off.

All replays are scored on the same steps, so a setting has the same figures in every table.
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
"""Move prices to compare in the trade-off between balance and moves."""
SAME_TIME = 0.01
"""Minimum relative time saving that justifies more slots or moves."""
_PRICES = {f"price {price:g}": price for price in MOVE_PRICES}
_FREE = ", free moves"
"""Label suffix for jobs in which moves are free."""
_SAME_PAR = 0.01
"""Relative distance from the best PAR within which PARs count as equal. The cheapest of equal settings is chosen."""
_SURE_ERRORS = 2.0
"""Maximum difference between two PARs that count as equal, in standard errors."""
_MIN_INTERVALS = 4
"""Minimum number of intervals for computing the standard error of a PAR."""
_MEMORY_GAIN = 0.1
"""Fraction of the largest gain that extra slots must add to justify their memory if there is no cost curve."""
_READING_TOKENS = 128.0
"""Mean tokens per expert below which most devices are memory-bound, because they must read every weight. The knees of
the shipped curves are at 100 to 150 tokens."""
_MIN_GAIN = 0.03
"""Minimum PAR reduction for which balancing pays off."""


@dataclass(frozen=True)
class Option:
    """A setting that was tried, with its results.

    Parameters
    ----------
    label
        Name of the setting.
    setup
        Slots per rank and schedule.
    move_price
        Move price.
    par
        Realised PAR.
    moved_per_100_steps
        Number of slots that receive weights per 100 steps, as a fraction of all slots.
    net_ms
        Time saved per step, net of switching, in milliseconds; ``None`` if the expert time is unknown.
    moe_ms
        Time per step of each layer's slowest rank, summed over the layers, in milliseconds; ``None`` if there is no
        cost curve.
    bytes_per_rank
        Memory of a rank's experts in all layers, in bytes; 0 if an expert's size is unknown.
    par_D
        float64 ``[D]``, realised PAR in each interval.
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
        True if balancing pays off.
    share
        Fraction of the expert time that the advised setting saves, net of switching if times are known.
    ranks_worth
        Saved expert time, expressed as an equivalent number of ranks.
    ranks
        Total number of ranks.
    redundant_bytes_per_rank
        Memory of the advised redundant experts on each rank, in bytes; 0 if an expert's size is unknown.
    net_ms
        Time saved per step, net of switching, in milliseconds; ``None`` if neither a cost curve nor the step time is
        known.
    tokens_per_second
        Throughput without balancing; ``None`` unless the step time and top-k are known.
    tokens_per_second_won
        Throughput increase with the advised setting; ``None`` if the throughput is unknown.
    reasons
        Sentences that explain the verdict to an operator.
    par_left_alone
        PAR without redundancy and balancing.
    par
        PAR with the advised setting.
    floor
        Noise floor.
    redundant
        Advised number of redundant experts per layer.
    chosen
        The advised setting.
    by_redundancy
        Settings with different numbers of slots under the advised schedule.
    by_schedule
        Settings with different windows and intervals, all with the number of slots chosen in the first round.
    by_moves
        Settings with different move prices, all with the number of slots chosen in the first round. Empty for an
        external policy, which has no move price.
    gain_L
        float64 ``[L]``, PAR reduction per layer with the advised setting, compared with no balancing and no redundancy.
    moe_ms_left_alone
        Time per step of each layer's slowest rank without redundancy and balancing, summed over the layers, in
        milliseconds; ``None`` if there is no cost curve.
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
        Function that replays the jobs in a round.
    slots
        Slots per rank to try.
    window
        Window and interval used in the first round, in steps.
    steps
        Number of steps in the trace.
    settings
        Planner settings used in all rounds.
    tokens_per_step
        Number of tokens that the model processes per step; ``None`` if unknown.
    tokens_per_expert
        Mean number of tokens per expert and step; ``None`` if unknown. If it is low, the advice warns that time may not
        be proportional to tokens.
    policy
        Name of the policy to advise on.

    Raises
    ------
    ReplayError
        If a round was interrupted.
    """
    fewest = Setup(min(slots), window, window)
    start = max(setup.first for setup in (fewest, *_schedules(fewest, steps)))
    rounds = _Rounds(run, policy, settings, slots, start)
    first = rounds.try_slots(fewest)
    alone = _left_alone(first)
    first_options = _without_losses(_options(first, alone, settings), first.costs)
    first_choice = cheapest(first_options, alone.par)
    near = first_choice.setup
    second = rounds.try_schedules(near, steps, first_choice.move_price)
    second_options = _options(second, alone, replace(settings, move_price=first_choice.move_price))
    by_schedule = [option for option in second_options if option.label not in _PRICES]
    by_price = [option for option in second_options if option.label in _PRICES]
    calmest = min(_near_best(by_schedule), key=lambda option: option.moved_per_100_steps).setup
    third = first
    if (calmest.window, calmest.interval) != (near.window, near.interval):
        third = rounds.try_slots(calmest)
    alone = _left_alone(third)
    options = _without_losses(_options(third, alone, settings), third.costs)
    chosen = cheapest(options, alone.par)
    if chosen.setup.slots > near.slots:
        # Keep the first round's schedule, because the new one needs more slots and therefore more memory.
        third = first
        options = first_options
        chosen = first_choice
    return _advice(
        third,
        chosen,
        _one_per_slots(options, chosen),
        _distinct(by_schedule, calmest),
        _distinct(by_price),
        tokens_per_step,
        tokens_per_expert,
    )


@dataclass(frozen=True)
class _Rounds:
    """Runner for the rounds of replays on which the advice is based.

    Parameters
    ----------
    run
        Function that replays the jobs in a round.
    policy
        Name of the policy to advise on.
    settings
        Planner settings used in all rounds.
    slots
        Slots per rank to try.
    start
        Step of the first decision in all rounds.
    """

    run: Callable[[list[Job]], Replay]
    policy: str
    settings: PlannerSettings
    slots: Sequence[int]
    start: int

    def try_slots(self, schedule: Setup) -> Replay:
        """Replay with every slot count, and again with free moves if the planner sets the move price."""
        setups = [replace(schedule, slots=count, start=self.start) for count in self.slots]
        jobs = self._jobs(setups, self.settings.move_price)
        if self.settings.move_price == AUTO and jobs[-1].external() is None:
            free = replace(self.settings, move_price=0.0)
            jobs += [
                Job.of(f"{job.label}{_FREE}", job.setup, self.policy, free) for job in jobs if job.policy
            ]
        return self._replay(jobs)

    def try_schedules(self, near: Setup, steps: int, price: NumberOrAuto) -> Replay:
        """Replay with schedules similar to a setup's, and with all move prices under the setup's own schedule.

        Parameters
        ----------
        near
            Setup that determines the number of slots for all schedules.
        steps
            Number of steps in the trace.
        price
            Move price for the schedules.
        """
        setups = [replace(setup, start=self.start) for setup in _schedules(near, steps)]
        jobs = self._jobs(setups, price)
        if jobs[-1].external() is None:
            same_schedule = [
                setup for setup in setups if (setup.window, setup.interval) == (near.window, near.interval)
            ]
            setup = same_schedule[0] if same_schedule else setups[0]
            jobs += [
                Job.of(label, setup, self.policy, replace(self.settings, move_price=move_price))
                for label, move_price in _PRICES.items()
            ]
        return self._replay(jobs)

    def _jobs(self, setups: Sequence[Setup], price: NumberOrAuto) -> list[Job]:
        return jobs_for([self.policy], setups, replace(self.settings, move_price=price), hindsight=False)

    def _replay(self, jobs: list[Job]) -> Replay:
        """Replay jobs. Raises ``ReplayError`` if the replay was interrupted."""
        result = self.run(jobs)
        if result.interrupted:
            raise ReplayError("the replay was stopped before there were enough results for advice")
        return result


def _advice(
    replay: Replay,
    chosen: Option,
    by_redundancy: Sequence[Option],
    by_schedule: tuple[Option, ...],
    by_moves: tuple[Option, ...],
    tokens_per_step: float | None,
    tokens_per_expert: float | None,
) -> Advice:
    """Return the advice to deploy ``chosen``, which must be one of the settings in ``replay``."""
    alone = _left_alone(replay)
    replayed = next(policy for policy in replay.policies if policy.label == chosen.label)
    score = replay.score(replayed)
    pays, reasons = _verdict(replay.costs, alone, score, chosen)
    reasons += _reading_warnings(replay, tokens_per_expert)
    baseline = min(replay.baselines, key=lambda baseline: baseline.setup.slots)
    share, net_ms = _saved(replay, alone, score, chosen)
    rate = None
    if tokens_per_step is not None and replay.costs.step_ms:
        rate = 1e3 * tokens_per_step / replay.costs.step_ms
    rate_gain = None
    if rate is not None and net_ms is not None:
        rate_gain = rate * net_ms / (replay.costs.step_ms - net_ms)
    return Advice(
        pays=pays,
        share=share,
        ranks_worth=share * replay.ranks,
        ranks=replay.ranks,
        redundant_bytes_per_rank=_redundant_bytes(replay, chosen.setup.slots),
        net_ms=net_ms,
        tokens_per_second=rate,
        tokens_per_second_won=rate_gain,
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
    """Return the saved fraction of the expert time and, if times are known, the milliseconds saved per step."""
    share = 1.0 - score.par / alone.par
    if chosen.net_ms is None:
        return share, None
    if alone.moe_ms is not None:
        return chosen.net_ms / alone.moe_ms, chosen.net_ms
    if not replay.costs.step_ms:
        return share, None
    experts_ms = replay.layers * replay.costs.layer_ms
    return chosen.net_ms / experts_ms, chosen.net_ms


def _reading_warnings(replay: Replay, tokens_per_expert: float | None) -> list[str]:
    """Describe the cost of a slot or, if there is no cost curve, warn that few tokens may take as long as many."""
    curve = replay.costs.curve
    if curve is None:
        if tokens_per_expert is None or tokens_per_expert >= _READING_TOKENS:
            return []
        return [
            f"An expert gets {tokens_per_expert:.0f} tokens per step on average. A device takes no longer for 100 or "
            "200 tokens than for one, because reading the weights dominates, and a redundant slot adds a read. Use "
            "--gpu with --model, or --cost-curve, to estimate the time that balancing saves."
        ]
    if curve.linear:
        return []
    slot_bytes = replay.layers * replay.costs.bytes_per_expert
    memory = f", and {slot_bytes / 1e9:.2f} GB of a rank's memory" if slot_bytes else ""
    warning = f"Each slot that gets tokens takes {curve.read_us:.1f} us per layer and step to read its weights{memory}."
    if tokens_per_expert is not None and tokens_per_expert < curve.knee_tokens:
        warning += (
            f" An expert gets {tokens_per_expert:.0f} tokens per step on average. A slot takes no longer for "
            f"{curve.knee_tokens:.0f} tokens than for one, so balancing tokens hardly shortens these steps."
        )
    return [warning]


def _redundant_bytes(replay: Replay, slots: int) -> int:
    """Return the memory of the redundant slots on each rank, in bytes."""
    min_slots = -(-replay.experts // replay.ranks)
    return replay.layers * (slots - min_slots) * replay.costs.bytes_per_expert


def _distinct(options: Sequence[Option], preferred: Setup | None = None) -> tuple[Option, ...]:
    """Drop settings with the same results as an earlier one, but keep ``preferred`` over its duplicates."""
    option_of_results: dict[tuple[object, ...], Option] = {}
    for option in options:
        results = (round(option.par, 3), round(option.moved_per_100_steps, 3), option.moe_ms)
        if results not in option_of_results or option.setup == preferred:
            option_of_results[results] = option
    return tuple(option_of_results.values())


def cheapest(options: Sequence[Option], left_alone: float = 1.0) -> Option:
    """Return the option with the fewest slots among those with a near-best time (or PAR, if times are unknown).

    If times are unknown, extra slots must add a tenth of the largest gain, because they cost memory.

    Parameters
    ----------
    options
        Options to choose from.
    left_alone
        PAR without redundancy and balancing, which is the baseline of all gains.

    Examples
    --------
    Going from five slots to six adds less than a tenth of the largest gain, 0.89:

    >>> options = [
    ...     Option(f"{slots} slots", Setup(slots, 40, 40), 0.0, par, moved_per_100_steps=0.1, net_ms=None)
    ...     for slots, par in ((4, 1.75), (5, 1.25), (6, 1.20))
    ... ]
    >>> cheapest(options, left_alone=2.09).label
    '5 slots'
    """
    gain = left_alone - min(option.par for option in options)
    return min(_near_best(options, _MEMORY_GAIN * gain), key=lambda option: option.setup.slots)


def _near_best(options: Sequence[Option], tolerance: float = 0.0) -> list[Option]:
    """Return the options with a near-best time or, if times are unknown, a near-best PAR.

    A time may exceed the best time by one percent. A PAR may exceed the best PAR by one percent, by ``tolerance``, or
    by the standard error of their difference, whichever is largest.
    """
    times = [option.moe_ms for option in options if option.moe_ms is not None]
    if len(times) == len(options):
        limit = min(times) * (1 + SAME_TIME)
        return [option for option in options if option.moe_ms is not None and option.moe_ms <= limit]
    best = min(options, key=lambda option: option.par)
    return [
        option
        for option in options
        if option.par - best.par
        <= max(_SAME_PAR * best.par, tolerance, _SURE_ERRORS * _error_of_difference(option, best))
    ]


def _error_of_difference(option: Option, best: Option) -> float:
    """Return the standard error of the difference between two PARs; 0 if their intervals cannot be compared."""
    if option.par_D.size != best.par_D.size or option.par_D.size < _MIN_INTERVALS:
        return 0.0
    difference_D = option.par_D - best.par_D
    return standard_error(difference_D[~np.isnan(difference_D)])


def _schedules(near: Setup, steps: int) -> list[Setup]:
    """Return setups with shorter and longer windows and intervals, if the trace is long enough for them."""
    counts = sorted({max(1, near.window // 4), near.window, 2 * near.window})
    return [
        Setup(near.slots, window, interval)
        for window in counts
        for interval in counts
        if 3 * window < steps and 2 * interval < steps
    ] or [near]


def _left_alone(replay: Replay) -> Score:
    """Return the score of the unbalanced layout with the fewest slots, which has no redundant experts."""
    fewest = min(replay.baselines, key=lambda baseline: baseline.setup.slots)
    return replay.score(fewest)


def _without_losses(options: Sequence[Option], costs: Costs) -> list[Option]:
    """If times are known, drop settings with free moves that save less time than settings with priced moves.

    Free moves are tried because the price of the first moves may keep a layer from changing. In that case, free moves
    may gain as much as an extra slot per rank would, at no cost in memory. In the list, settings with priced moves come
    before settings with free moves.
    """
    if costs.curve is None and not costs.step_ms:
        return list(options)
    priced_ms = {option.setup: option.net_ms or 0.0 for option in options if not option.label.endswith(_FREE)}
    return [option for option in options if (option.net_ms or 0.0) >= priced_ms[option.setup]]


def _one_per_slots(options: Sequence[Option], chosen: Option) -> list[Option]:
    """Return ``chosen``, and one option with priced moves for each of the remaining slot counts."""
    by_slots: dict[int, Option] = {}
    for option in options:
        by_slots.setdefault(option.setup.slots, option)
    return [chosen if slots == chosen.setup.slots else option for slots, option in by_slots.items()]


def _options(replay: Replay, alone: Score, settings: PlannerSettings) -> list[Option]:
    """Return the settings of a replay with their results, compared with no balancing and no redundancy."""
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
    """Return the move price of the job with this label."""
    return 0.0 if label.endswith(_FREE) else _PRICES.get(label, settings.move_price)


def _verdict(costs: Costs, alone: Score, score: Score, chosen: Option) -> tuple[bool, list[str]]:
    """Decide whether the chosen setting pays off, and return the verdict with its reasons.

    The cost curve determines the verdict. Without one, the PAR and the given times do.
    """
    reasons = [
        f"PAR goes from {alone.par:.3f} to {score.par:.3f}; even perfect balance would leave about {score.floor:.3f}."
    ]
    if alone.moe_ms is not None and chosen.moe_ms is not None and chosen.net_ms is not None:
        return chosen.net_ms > SAME_TIME * alone.moe_ms, [
            f"According to the cost curve, the slowest ranks of all layers take {chosen.moe_ms:.3f} ms per step, "
            f"compared with {alone.moe_ms:.3f} ms with the initial placement. Switching costs {score.stall_ms:.3f} ms "
            f"per step, which leaves a gain of {chosen.net_ms:.3f} ms.",
            *reasons,
        ]
    pays = alone.par - score.par >= _MIN_GAIN
    if alone.par - score.floor < _MIN_GAIN:
        reasons.append("The ranks are already as balanced as token sampling allows.")
    elif not pays:
        reasons.append(
            "The heat changes faster than placements can follow: a placement that fits one window does not fit the "
            "next."
        )
    if score.floor - 1 > 0.5 * (alone.par - 1):
        reasons.append(
            "A rank gets so few tokens per layer and step that chance causes most of the imbalance. No placement can "
            "fix that, but larger batches would help."
        )
    estimate = costs.estimate_text(score.par, alone.par)
    if estimate is not None:
        reasons.append(
            f"{estimate[0].upper()}{estimate[1:]}. Set --layer-ms or --cost-curve for a precise figure."
        )
    elif costs.step_ms and chosen.net_ms is not None and chosen.net_ms <= 0:
        pays = False
        reasons.append(f"Switching costs as much as balancing saves: {chosen.net_ms:.3f} ms per step, net.")
    elif costs.step_ms:
        reasons.append(
            f"With the given layer_ms, balancing saves {chosen.net_ms:.2f} ms per {costs.step_ms:g} ms step, net of "
            "switching costs."
        )
    return pays, reasons
