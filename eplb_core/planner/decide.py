"""One decision, as a pure function: the layers to change, their new placement, and the reasons.

Only the layers that are worth it are looked into: layer-wise cherry-picking, the third of FlashLB's ideas. Ours departs
from FlashLB in what is worth it. FlashLB takes layers whose balancedness fell under a fixed value, or under 0.95 of
what it was after their last change, and sends the largest gains. Ours keeps no such history: a layer is worth it
where more than ``min_gain`` can be won beyond what its experts' own jumps leave (``score.volatility_bound``), and each
change must then pay for its moves on heat that it was not fitted to (``solver.holdout``).

References
----------
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_core.cost.devices import knee_tokens
from eplb_core.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_core.heat.window import Counts, Window
from eplb_core.placement import (
    Float64,
    Int32,
    Placement,
    PlacementError,
    check_layer,
    check_log2phy,
    mean_par,
    par,
    with_entries,
)
from eplb_core.planner.dealing import first_tables, host_tables, tables_of_sources
from eplb_core.planner.holdout import SMALL_BATCH, HeldOut, Parts, held_out, paying
from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.planner.price import move_price
from eplb_core.planner.request import SolveRequest, groups_on_nodes, solve_picked, time_curve
from eplb_core.planner.score import (
    drawn_par,
    expected_loads,
    noise_floor,
    par_by_step,
    sampling_floor,
    split_steps,
    split_us,
    volatility_bound,
)
from eplb_core.planner.settings import STEP, PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.engine import OutOfTimeError, SolverError
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import FRESH, KEEP, TABLES, Candidate, Recommendation, SearchOptions
from eplb_core.solver.topology import choose_senders

_NOTHING_IN_WHOLE_TOKENS = "kept: with whole tokens, a change would gain nothing on steps like these"
_ROUNDING = 1e-9
_READING_STEPS = 0.95
"""Fraction of steps that must have few tokens for a layer to be left alone. It tolerates short prefills in between."""
_NOTHING_PAYS = "kept: nothing pays for its moves on steps that it was not fitted to"


def plan(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
    search: SearchOptions | None = None,
    recommendations: Sequence[Recommendation | None] = (),
    hold_out: bool = True,
) -> Plan:
    """Decide what to change, given the heat of a window and what serves now.

    Parameters
    ----------
    window
        Heat, and each expert's split over the source ranks where the host reports it.
    placement, log2phy_RLE
        What is deployed: the placement and int32 ``[R, L, E]`` the table of each source rank; ``[R, L, E, D]`` where
        they deal.
    topology
        Nodes and token groups of the ranks.
    settings
        How to decide.
    serving_steps
        Steps that what is decided is expected to serve, over which moves must pay; by default those of the window.
    moving
        What is measured of the cost of moves, and of what they may win; the settings' numbers where it is not.
    search
        Parts of the solver's method that are left out, to measure what they are worth; by default none.
    recommendations
        Those of the decision before, where its plan serves and heat has not changed since.
    hold_out
        False to skip the hold-out of small batches (``planner.holdout``), if nobody reads the promise.

    Returns
    -------
    Plan
        The same for the same arguments, whatever the number of threads. A layer whose solution turns out invalid keeps
        what it has, and its verdict says so; where experts are bound to their ranks, all layers do.

    Raises
    ------
    HeatError, PlacementError, TopologyError
        Where the arguments contradict each other.
    """
    asked = SolveRequest(
        window, placement, log2phy_RLE, topology, settings, search or SearchOptions(), recommendations
    )
    steps = serving_steps or float(window.steps)
    price = move_price(settings, placement.slots, topology.bytes_per_expert, steps, moving)
    groups, why_ungrouped = groups_on_nodes(settings, placement, topology)
    judge = _judge(asked, price.price, why_ungrouped)
    if settings.policy == "none" or topology.rank_bound:
        reason = "its experts are bound to their ranks" if topology.rank_bound else "the policy is none"
        kept = tuple(judge.kept(layer, f"kept: {reason}") for layer in range(window.layers))
        return Plan((), kept, par_TL=judge.par_TL)
    picked = _picked(judge)
    answers = solve_picked(asked, picked, judge.floor_L, groups, price.price)
    # Under a cost curve the solver has held out times, of which ratios say little.
    judged = hold_out and asked.search.holdout and time_curve(settings) is None
    tried = _held_out(judge, picked, answers, groups, price.price) if judged else {}
    reasons = _unpaid(judge, picked, answers, tried)
    verdicts = [judge.not_picked(layer) for layer in range(window.layers)]
    changed, par_TL = [], judge.par_TL.copy()
    follow: list[Recommendation | None] = [None] * window.layers
    for layer, answer in zip(picked.tolist(), answers, strict=True):
        if layer in reasons:
            verdicts[layer] = judge.kept(layer, reasons[layer])
            continue
        if isinstance(answer, LayerResult) and layer in tried:
            answer = _with_optimism(answer, tried[layer].optimism)
        verdict, change, par_T = _solved(layer, answer, judge)
        # With a large batch, the change has gained on steps that it was not fitted to. On drift, its promise may still
        # exceed the PAR seen, but keeping the layer would do worse on later steps as well.
        by_ratio = asked.search.warm and settings.policy == "flashlb" and settings.cost_curve is None
        by_ratio &= bool(judge.small_L[layer])
        if by_ratio and change is not None and verdict.par_planned > verdict.par_seen + _ROUNDING:
            verdicts[layer] = judge.kept(layer, _NOTHING_IN_WHOLE_TOKENS)
            continue
        verdicts[layer], par_TL[:, layer] = verdict, par_T
        if change is not None and isinstance(answer, LayerResult):
            changed.append(change)
            follow[layer] = answer.recommendation
    changed.sort(key=lambda layer_plan: _gain(verdicts[layer_plan.layer]), reverse=True)
    return Plan(tuple(changed), tuple(verdicts), price, par_TL, follow)


def plan_afresh(
    window: Window,
    placement: Placement,
    topology: Topology,
    settings: PlannerSettings,
    search: SearchOptions | None = None,
    hold_out: bool = False,
) -> Plan:
    """Solve every layer from scratch; ``placement`` is what moves are counted against, the rest is as for ``plan``.

    Every layer changes, whatever that gains. With ``hold_out`` the promise allows for steps that placements were not
    fitted to.
    """
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None)
    deployed_RLE = first_tables(placement, settings.split, settings.deal_width)
    search = replace(search or SearchOptions(), warm=False)
    return plan(window, placement, deployed_RLE, topology, settings, search=search, hold_out=hold_out)


def _cherry_pick(par_L: Float64, lost_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of at most ``max_layers`` layers past the threshold with more than ``min_gain`` to win, worst first."""
    worst_first = np.argsort(lost_L - par_L, kind="stable")
    worth_it_L = (par_L > settings.par_threshold) & (par_L - lost_L > settings.min_gain)
    return worst_first[worth_it_L[worst_first]][: settings.max_layers]


def _picked(judge: _Judge) -> npt.NDArray[np.int64]:
    """Indices of the layers to solve, worst first; under a curve all with tokens: their ratio says little of time."""
    settings, search = judge.asked.settings, judge.asked.search
    if time_curve(settings) is not None:
        worst_first = np.argsort(-np.nan_to_num(judge.par_L, nan=0.0), kind="stable")
        return worst_first[~np.isnan(judge.par_L[worst_first])][: settings.max_layers]
    lost_L = judge.bound_L if search.warm and search.volatility else np.ones(judge.par_L.size)
    worth_it_L = np.where(judge.reading_L, 1.0, judge.episode_par_L)
    return _cherry_pick(worth_it_L, lost_L, settings)


@dataclass(frozen=True)
class _Judge:
    """Layers as they serve before any is solved, and the verdicts that follow from that.

    Parameters
    ----------
    asked, price, why_ungrouped
        The question, the price of moves, and why groups of experts are not kept together, where that was asked for.
    par_TL
        float64 ``[T, L]``, ratio of each step.
    par_L, floor_L
        float64 ``[L]``, its mean, and what token sampling alone leaves of it.
    episode_par_L, bound_L
        float64 ``[L]``, ratio per episode, and what sampling and the experts' jumps leave of it.
    us_L
        float64 ``[L]``, microseconds of the slowest rank in a step; NaN without a cost curve or tokens.
    small_L
        bool ``[L]``, layers whose steps have so few tokens that changes are held out (``planner.holdout``).
    reading_L
        bool ``[L]``, layers whose experts get so few tokens that reading weights takes all the time.
    """

    asked: SolveRequest
    price: float
    why_ungrouped: str
    par_TL: Float64
    par_L: Float64
    floor_L: Float64
    episode_par_L: Float64
    bound_L: Float64
    us_L: Float64
    small_L: npt.NDArray[np.bool_]
    reading_L: npt.NDArray[np.bool_]

    def kept(self, layer: int, reason: str) -> LayerVerdict:
        par, floor, us = (float(values_L[layer]) for values_L in (self.par_L, self.floor_L, self.us_L))
        seen = None if math.isnan(us) else us
        return LayerVerdict(layer, par, par, floor, 0, False, reason, us_seen=seen, us_planned=seen)

    def not_picked(self, layer: int) -> LayerVerdict:
        settings, seen, bound = self.asked.settings, self.episode_par_L[layer], self.bound_L[layer]
        if math.isnan(self.par_L[layer]):
            reason = "left alone: it received no tokens"
        elif seen <= settings.par_threshold:
            reason = (
                f"left alone: {seen:.3f} in episodes is at or below the threshold {settings.par_threshold:g}"
            )
        elif self.reading_L[layer]:
            topology = self.asked.topology
            knee = knee_tokens(topology.device, topology.bytes_per_expert)
            reason = (
                f"left alone: no expert gets more than {knee:.0f} tokens in a step, and up to that many take no "
                f"longer than reading its weights (estimate for {topology.device})"
            )
        elif seen - bound <= settings.min_gain:
            reason = f"left alone: {seen:.3f} in episodes is what its experts' jumps make of balanced ranks"
        else:
            reason = f"waits: only the {settings.max_layers} worst layers change in one decision"
        return self.kept(layer, reason)

    def changed(
        self, layer: int, answer: LayerResult, moves: int, planned: float, us: float | None
    ) -> LayerVerdict:
        kept = self.kept(layer, "")
        # The next window is another draw. A hold-out has allowed for that already.
        clamped = self.asked.search.warm and not (self.small_L[layer] and answer.held is not None)
        least = min(kept.noise_floor, kept.par_seen) if clamped else 1.0
        if answer.taken == TABLES or moves == 0:
            done = "tables retuned, no weights move"
        elif answer.taken == FRESH:
            done = f"placed from scratch, {moves} slots receive weights"
        else:
            done = f"improved from where it is, {moves} slots receive weights"
        reason = f"{done}: {kept.par_seen:.3f} to {planned:.3f} on this window"
        if answer.trimmed or math.isfinite(answer.half_life):
            reason += f"; aimed at {'bursts' if answer.trimmed else 'drift'}"
        if answer.crossed > 0 or answer.crosses > 0:
            reason += f"; {answer.crosses:.0%} of its tokens leave their node, {answer.crossed:.0%} before"
        if self.why_ungrouped:
            reason += f"; experts may be on any node: {self.why_ungrouped}"
        if us is not None:
            reason += f"; its slowest rank {kept.us_seen:.1f} us to {us:.1f}"
        return replace(
            kept,
            par_planned=max(planned + (answer.optimism or 0.0), least),
            moves=moves,
            changed=True,
            reason=reason,
            bytes=moves * self.asked.topology.bytes_per_expert,
            us_planned=us,
            optimism=answer.optimism,
        )

    def raised_par(self, layer: int, answer: LayerResult, par_T: Float64) -> tuple[float, float] | None:
        """Return the mean PAR of the steps before and after a change, if the change does not lower it.

        Such a change lowers only the PAR of episodes. If it is fitted to fading heat, only the newer half of the window
        counts, because the older half does not predict later steps. ``None`` if the PAR of steps falls or is not a
        criterion.
        """
        if not (self.asked.search.warm and self.asked.settings.policy == "flashlb"):
            return None
        first = par_T.size // 2 if math.isfinite(answer.half_life) else 0
        seen = float(mean_par(self.par_TL[first:, layer]))
        planned = float(mean_par(par_T[first:]))
        return (seen, planned) if planned >= seen else None

    def pays_in_time(self, layer: int, moves: int, us: float) -> bool:
        """True where a change that was found by tokens wins enough time for itself and its moves.

        Where a host splits by step placements are searched by tokens: whether that is worth the replicas that it wakes,
        only the curve says.
        """
        settings, placement = self.asked.settings, self.asked.placement
        if settings.split != STEP or settings.cost_curve is None or settings.cost_curve.linear:
            return True
        least = settings.min_gain + self.price * moves / (placement.ranks * placement.slots)
        return bool(self.us_L[layer] - us > least * self.us_L[layer])


def _judge(asked: SolveRequest, price: float, why_ungrouped: str) -> _Judge:
    """Ratios and times of all layers as they are served, per step for people and per episode for the decision."""
    window, ranks, settings = asked.window, asked.placement.ranks, asked.settings
    served = asked.placement, asked.log2phy_RLE, window.source_RLE, settings.split
    steps = split_steps(window.heat_TLE, *served, episodes=asked.episodes)
    par_TL = par_by_step(steps)
    busy_L = np.maximum((steps.tokens_TK > 0).sum(axis=0), 1)
    # If the host splits by step, few tokens are split to be even as many are.
    small_L = (steps.tokens_TK.sum(axis=0) / busy_L <= SMALL_BATCH * ranks) & (settings.split != STEP)
    if small_L.any():
        par_TL[:, small_L] = _centred(par_TL, drawn_par(window.heat_TLE, *served))[:, small_L]
    par_L = mean_par(par_TL, axis=0)
    if settings.split == STEP:
        heat_NLE = asked.episode_heat(np.arange(window.layers)).transpose(1, 0, 2)
        loads_NLR = expected_loads(heat_NLE, *served)
        # Every step is balanced for itself, so neither token sampling nor experts' jumps set a floor.
        floor_L = np.where(np.isnan(par_L), np.nan, 1.0)
        bound_L = np.ones(window.layers)
    else:
        loads_NLR = steps.loads_NKR
        floor_L = sampling_floor(steps)
        # For a decision a layer without tokens is balanced, since nothing can be won there.
        bound_L = np.nan_to_num(noise_floor(loads_NLR.sum(axis=2), ranks), nan=1.0)
        if asked.episodes > 1:
            bound_L = volatility_bound(steps)
        if asked.order is not None:
            heat_NLE = asked.episode_heat(np.arange(window.layers)).transpose(1, 0, 2)
            loads_NLR = expected_loads(heat_NLE, *served)
    us_L = np.full(window.layers, np.nan)
    if settings.cost_curve is not None:
        us_L = mean_par(split_us(window.heat_TLE, *served, settings.cost_curve), axis=0)
    episode_par_L = np.nan_to_num(par(loads_NLR), nan=1.0)
    return _Judge(
        asked,
        price,
        why_ungrouped,
        par_TL,
        par_L,
        floor_L,
        episode_par_L,
        bound_L,
        us_L,
        small_L,
        reading_L=_reading_layers(asked),
    )


def _reading_layers(asked: SolveRequest) -> npt.NDArray[np.bool_]:
    """Return the layers in which reading weights takes all the time, as estimated for the device, bool ``[L]``.

    In such a layer, all experts stay below the knee of the device's curve in nearly all steps. No layer qualifies if
    the deployment's cost curve is known.
    """
    window = asked.window
    settings = asked.settings
    topology = asked.topology
    knee = None
    if settings.cost_curve is None and settings.estimate_device and asked.search.warm:
        knee = knee_tokens(topology.device, topology.bytes_per_expert)
    if knee is None:
        return np.zeros(window.layers, dtype=np.bool_)
    few_TL = window.heat_TLE.max(axis=2) <= knee
    reading_L: npt.NDArray[np.bool_] = few_TL.mean(axis=0) >= _READING_STEPS
    return reading_L


def _centred(par_TL: Float64, drawn_TL: Float64) -> Float64:
    """Return one draw's ratios, which scatter as served ones do, about the means of several draws."""
    centred_TL: Float64 = par_TL + (mean_par(drawn_TL, axis=0) - mean_par(par_TL, axis=0))
    return centred_TL


def _held_out(
    judge: _Judge,
    picked: npt.NDArray[np.int64],
    answers: Sequence[LayerResult | SolverError],
    groups: int,
    price: float,
) -> dict[int, HeldOut]:
    """Judge the changes of small batches on steps that they were not fitted to, by layer.

    The solver's own hold-out has fitted a counterpart already, to the older half of the episodes. Without one, the
    layer is placed from scratch once more, for one part of the window.
    """
    asked = judge.asked
    changing = {
        layer: answer
        for layer, answer in zip(picked.tolist(), answers, strict=True)
        if judge.small_L[layer] and isinstance(answer, LayerResult) and answer.taken != KEEP
    }
    if not changing:
        return {}
    followed = {
        layer for layer in changing if asked.recommendations and asked.recommendations[layer] is not None
    }
    missing = np.array(
        [layer for layer in changing if changing[layer].held is None and layer not in followed], np.int64
    )
    heat_TLE, parts = asked.window.heat_TLE, Parts.of(asked.window.heat_TLE)
    halves = Parts.halves(heat_TLE if asked.order is None else heat_TLE[asked.order], asked.episodes)
    tried = {
        layer: _judged(asked, halves, layer, answer.held)
        for layer, answer in changing.items()
        if answer.held is not None
    }
    if not (missing.size and parts.fit_TLE.any() and parts.test_TLE.any()):
        return tried
    window = Window(parts.fit_TLE, asked.window.source_RLE)
    refit = replace(asked, window=window, search=replace(asked.search, warm=False), recommendations=())
    refitted = solve_picked(refit, missing, judge.floor_L, groups, price)
    for layer, answer in zip(missing.tolist(), refitted, strict=True):
        if isinstance(answer, LayerResult):
            tried[layer] = _judged(asked, parts, layer, answer.found)
    return tried


def _judged(asked: SolveRequest, parts: Parts, layer: int, fitted: Candidate) -> HeldOut:
    """Judge a layer's candidate that was fitted to the first part of the window."""
    _, first_G, group_R = asked.topology.token_groups()
    experts, source_RLE = asked.window.experts, asked.window.source_RLE
    log2phy_RE = tables_of_sources(fitted.log2phy_GE, first_G.size)[group_R]
    return held_out(
        parts,
        layer,
        (Placement(asked.placement.phy2log_LRS[layer, None], experts), asked.log2phy_RLE[:, layer, None]),
        (Placement(fitted.phy2log_RS[None], experts), log2phy_RE[:, None]),
        None if source_RLE is None else source_RLE[:, layer, None],
        asked.settings.split,
    )


def _unpaid(
    judge: _Judge,
    picked: npt.NDArray[np.int64],
    answers: Sequence[LayerResult | SolverError],
    tried: Mapping[int, HeldOut],
) -> dict[int, str]:
    """Return why layers are kept whose changes do not pay with whole tokens, by layer."""
    if not judge.asked.search.warm or judge.asked.settings.policy != "flashlb":
        return {}
    placement, costs = judge.asked.placement, {}
    for layer, answer in zip(picked.tolist(), answers, strict=True):
        if isinstance(answer, LayerResult) and layer in tried:
            price = judge.price * float(judge.par_L[layer])
            costs[layer] = price * answer.found.moves / (placement.ranks * placement.slots)
    pays = paying(tried, costs, judge.asked.settings.min_gain)
    return {
        layer: (
            f"kept: on steps that a change was not fitted to, whole tokens gain {one.gain:.3f} ± {one.error:.3f}, and "
            f"its moves cost {costs[layer]:.3f}"
        )
        for layer, one in tried.items()
        if layer not in pays
    }


def _with_optimism(answer: LayerResult, optimism: float) -> LayerResult:
    """Return the answer with the optimism of whole tokens, which a decision that follows it takes over."""
    recommendation = (
        None if answer.recommendation is None else answer.recommendation._replace(optimism=optimism)
    )
    return replace(answer, optimism=optimism, recommendation=recommendation)


def _solved(
    layer: int, answer: LayerResult | SolverError, judge: _Judge
) -> tuple[LayerVerdict, LayerPlan | None, Float64]:
    """Verdict on a layer by its answer, the change, if it is one, and the ratio of each step then, float64 ``[T]``."""

    def kept(reason: str) -> tuple[LayerVerdict, None, Float64]:
        return judge.kept(layer, reason), None, judge.par_TL[:, layer]

    if isinstance(answer, OutOfTimeError):
        return kept(f"waits: {answer}")
    if isinstance(answer, LayerResult) and answer.taken == KEEP:
        return kept(_NOTHING_PAYS)
    asked, curve = judge.asked, judge.asked.settings.cost_curve
    try:
        if isinstance(answer, SolverError):
            raise answer
        # No layer is switched unless its answer was checked.
        found = answer.found
        check_layer(found.phy2log_RS, asked.placement.experts)
        check_log2phy(found.log2phy_GE, found.phy2log_RS)
    except (SolverError, PlacementError) as error:
        return kept(f"kept: the solver failed ({error})")
    _, first_G, group_R = asked.topology.token_groups()
    log2phy_RE = tables_of_sources(found.log2phy_GE, first_G.size)[group_R]
    alone = _alone(asked, layer, found.phy2log_RS, log2phy_RE)
    layer_1 = np.array([layer])
    par_T1 = par_by_step(split_steps(*alone, layer_K=layer_1))
    if judge.small_L[layer]:
        par_T1 = _centred(par_T1, drawn_par(*alone, layer_1))
    par_T = par_T1[:, 0]
    planned = float(mean_par(par_T))
    us = None if curve is None else float(mean_par(split_us(*alone, curve, layer_K=layer_1)))
    before_RS = asked.placement.phy2log_LRS[layer].copy()
    moves_M5 = choose_senders(before_RS, found.phy2log_RS, asked.topology.nodes_R.copy())
    verdict = judge.changed(layer, answer, len(moves_M5), planned, us)
    raised = None if us is not None else judge.raised_par(layer, answer, par_T)
    if raised is not None:
        seen, after = raised
        return kept(f"kept: the change found would raise the PAR of its steps from {seen:.3f} to {after:.3f}")
    if us is not None and not judge.pays_in_time(layer, len(moves_M5), us):
        return kept(f"kept: too little time for {len(moves_M5)} moves would be won ({verdict.reason})")
    width = with_entries(asked.log2phy_RLE, 3).shape[3]
    tables = host_tables(log2phy_RE, found.phy2log_RS, width, asked.settings.split, first_G[group_R])
    return verdict, LayerPlan(layer, found.phy2log_RS, tables, moves_M5), par_T


def _alone(
    asked: SolveRequest, layer: int, phy2log_RS: Int32, log2phy_RE: Int32
) -> tuple[Counts, Placement, Int32, Float64 | None, str]:
    """Return the arguments of ``split_steps`` and ``split_us`` for one layer under another placement."""
    window, placement = asked.window, Placement(phy2log_RS[None], asked.window.experts)
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, layer, None]
    return window.heat_TLE, placement, log2phy_RE[:, None], source_R1E, asked.settings.split


def _gain(verdict: LayerVerdict) -> float:
    if verdict.us_seen is not None and verdict.us_planned is not None:
        return verdict.us_seen - verdict.us_planned
    return verdict.par_seen - verdict.par_planned
