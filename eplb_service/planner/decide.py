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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_service.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_service.heat.window import Counts, Window
from eplb_service.placement import (
    Float64,
    Int32,
    Placement,
    PlacementError,
    check_layer,
    check_log2phy,
    dealing_width,
    mean_par,
    par,
)
from eplb_service.planner.dealing import as_host_deals, first_tables, tables_of_sources
from eplb_service.planner.plan import LayerPlan, Plan
from eplb_service.planner.price import move_price
from eplb_service.planner.request import Question, groups_on_nodes, solve_picked, time_curve
from eplb_service.planner.score import (
    balanced_par,
    noise_floor,
    par_of_steps,
    split_loads,
    split_steps,
    split_us,
    volatility_bound,
)
from eplb_service.planner.settings import STEP, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.engine import OutOfTimeError, SolverError
from eplb_service.solver.layer import Answer
from eplb_service.solver.model import FRESH, KEEP, TABLES, Candidate, SearchOptions
from eplb_service.solver.topology import choose_senders
from eplb_service.wire.operator import LayerVerdict


def plan(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
    search: SearchOptions | None = None,
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
    asked = Question(window, placement, log2phy_RLE, topology, settings, search or SearchOptions())
    steps = serving_steps or float(window.steps)
    price = move_price(settings, placement.slots, topology.bytes_per_expert, steps, moving)
    groups, why_ungrouped = groups_on_nodes(settings, placement, topology)
    judge = _judge(asked, why_ungrouped)
    if settings.policy == "none" or topology.rank_bound:
        reason = "its experts are bound to their ranks" if topology.rank_bound else "the policy is none"
        return Plan((), tuple(judge.kept(layer, f"kept: {reason}") for layer in range(window.layers)))
    picked = _picked(judge, asked.search)
    answers = solve_picked(asked, picked, judge.par_L, judge.floor_L, groups, price.price)
    verdicts = [judge.not_picked(layer) for layer in range(window.layers)]
    changed, hindsight = [], []
    for layer, answer in zip(picked.tolist(), answers, strict=True):
        verdicts[layer], change, from_scratch = _solved(layer, answer, judge, asked)
        changed += [] if change is None else [change]
        hindsight += [] if from_scratch is None else [from_scratch]
    if settings.cost_curve is not None:
        verdicts = _with_times(verdicts, changed, asked)
        if settings.split == STEP and not settings.cost_curve.linear:
            # Searched by tokens: whether that is worth the replicas that it wakes, only the curve says.
            verdicts, changed = _without_slower(verdicts, changed, settings.min_gain, price.price)
    changed.sort(key=lambda layer_plan: _gain(verdicts[layer_plan.layer]), reverse=True)
    return Plan(tuple(changed), tuple(verdicts), price, tuple(hindsight))


def plan_afresh(
    window: Window,
    placement: Placement,
    topology: Topology,
    settings: PlannerSettings,
    search: SearchOptions | None = None,
) -> Plan:
    """Solve every layer from scratch; ``placement`` serves only as what moves are counted against.

    Parameters
    ----------
    window, placement, topology, settings, search
        As for ``plan``.
    """
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None)
    deployed_RLE = first_tables(placement, settings.split, settings.deal_width)
    search = replace(search or SearchOptions(), warm=False)
    return plan(window, placement, deployed_RLE, topology, settings, search=search)


def _cherry_pick(par_L: Float64, lost_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Indices of at most ``max_layers`` layers past the threshold with more than ``min_gain`` to win, worst first."""
    worst_first = np.argsort(lost_L - par_L, kind="stable")
    worth_it_L = (par_L > settings.par_threshold) & (par_L - lost_L > settings.min_gain)
    return worst_first[worth_it_L[worst_first]][: settings.max_layers]


def _picked(judge: _Judge, search: SearchOptions) -> npt.NDArray[np.int64]:
    """Indices of the layers to solve, worst first; under a curve all with tokens: their ratio says little of time."""
    if time_curve(judge.settings) is not None:
        worst_first = np.argsort(-np.nan_to_num(judge.par_L, nan=0.0), kind="stable")
        return worst_first[~np.isnan(judge.par_L[worst_first])][: judge.settings.max_layers]
    lost_L = judge.volatility_bound_L if search.warm and search.volatility else np.ones(judge.par_L.size)
    return _cherry_pick(judge.episode_par_L, lost_L, judge.settings)


@dataclass(frozen=True)
class _Judge:
    """Ratios of all layers per step and per episode before any is solved, and the verdicts that follow from them."""

    par_L: Float64
    floor_L: Float64
    episode_par_L: Float64
    episode_floor_L: Float64
    volatility_bound_L: Float64
    episode_steps: float
    bytes_per_expert: int
    settings: PlannerSettings
    why_ungrouped: str = ""

    def kept(self, layer: int, reason: str, hindsight: float | None = None) -> LayerVerdict:
        par, floor = float(self.par_L[layer]), float(self.floor_L[layer])
        return LayerVerdict(layer, par, par, floor, 0, changed=False, reason=reason, hindsight=hindsight)

    def not_picked(self, layer: int) -> LayerVerdict:
        settings = self.settings
        seen, floor, bound = (
            float(ratio_L[layer])
            for ratio_L in (self.episode_par_L, self.episode_floor_L, self.volatility_bound_L)
        )
        if math.isnan(self.par_L[layer]):
            reason = "left alone: it received no tokens"
        elif seen <= settings.par_threshold:
            reason = f"left alone: {seen:.3f} {self._unit()} is at or below the threshold {settings.par_threshold:g}"
        elif seen - floor <= settings.min_gain:
            reason = f"left alone: of {seen:.3f} {self._unit()}, {floor:.3f} is token noise that no placement can win"
        elif seen - bound <= settings.min_gain:
            reason = f"left alone: {seen:.3f} {self._unit()} is no more than its experts' jumps make of balanced ranks"
        else:
            reason = f"waits: only the {settings.max_layers} worst layers change in one decision"
        return self.kept(layer, reason)

    def unanswered(self, layer: int, cause: Exception | str) -> LayerVerdict:
        if isinstance(cause, OutOfTimeError):
            return self.kept(layer, f"waits: {cause}")
        return self.kept(layer, f"kept: the solver failed ({cause})")

    def not_worth_it(self, layer: int, answer: Answer, hindsight: float) -> LayerVerdict:
        if time_curve(self.settings) is not None:
            faster = 1 - answer.hindsight / answer.par_before
            reason = f"kept: nothing that pays for its moves is faster (hindsight: by {max(faster, 0.0):.1%})"
            return self.kept(layer, reason, hindsight)
        gain = float(self.episode_par_L[layer]) - answer.hindsight
        if gain <= self.settings.min_gain:
            reason = f"kept: even hindsight would have won only {max(gain, 0.0):.3f} {self._unit()}"
        else:
            reason = (
                f"kept: hindsight would have won {gain:.3f} {self._unit()}, but on the newer half of the window "
                "nothing fitted to the older half paid for itself"
            )
        return self.kept(layer, reason, hindsight)

    def changed(
        self, layer: int, answer: Answer, moves: int, planned: float, hindsight: float
    ) -> LayerVerdict:
        seen = float(self.par_L[layer])
        if answer.taken == TABLES or moves == 0:
            done = "tables retuned, no weights move"
        elif answer.taken == FRESH:
            done = f"placed from scratch, {moves} slots receive weights"
        else:
            done = f"improved from where it is, {moves} slots receive weights"
        reason = f"{done}: {seen:.3f} to {planned:.3f}"
        if math.isfinite(answer.half_life):
            steps = answer.half_life * self.episode_steps
            reason += f" on this window; aimed at where heat drifts (half-life {steps:.0f} steps)"
        elif answer.trimmed:
            reason += " on this window; aimed at what its experts have between bursts"
        if answer.crossed > 0 or answer.crosses > 0:
            reason += f"; {answer.crosses:.0%} of its tokens leave their node, {answer.crossed:.0%} before"
        if self.why_ungrouped:
            reason += f"; experts may be on any node: {self.why_ungrouped}"
        return LayerVerdict(
            layer,
            seen,
            planned,
            float(self.floor_L[layer]),
            moves,
            changed=True,
            reason=reason,
            hindsight=hindsight,
            bytes=moves * self.bytes_per_expert,
            optimism=answer.optimism,
        )

    def _unit(self) -> str:
        return "per step" if self.episode_steps == 1 else f"in episodes of {self.episode_steps:g} steps"


def _judge(asked: Question, why_ungrouped: str) -> _Judge:
    """Ratios of all layers as they are served, per step for people and per episode for the decision."""
    window, episodes, ranks = asked.window, asked.episodes, asked.placement.ranks
    served = asked.placement, asked.log2phy_RLE, window.source_RLE, asked.settings.split
    steps = split_steps(window.heat_TLE, *served, episodes=episodes)
    par_L = par_of_steps(steps)
    if asked.settings.split == STEP:
        heat_NLE = asked.episode_heat(np.arange(window.layers)).transpose(1, 0, 2)
        loads_NLR = split_loads(heat_NLE, *served)
        # Every step is balanced for itself, so neither token sampling nor experts' jumps set a floor.
        floor_L = np.where(np.isnan(par_L), np.nan, 1.0)
        drawn_L = bound_L = np.ones(window.layers)
    else:
        loads_NLR = steps.loads_NKR
        floor_L = noise_floor(steps.tokens_TK, ranks)
        # For a decision a layer without tokens is balanced, since nothing can be won there.
        drawn_L = np.nan_to_num(noise_floor(loads_NLR.sum(axis=2), ranks), nan=1.0)
        bound_L = drawn_L
        # Real routers' choices are not independent draws: what was measured may lie below what is computed for those.
        if window.steps > 1:
            floor_L = np.minimum(floor_L, balanced_par(steps.variance_K, ranks))
        if episodes > 1:
            bound_L = volatility_bound(steps)
    return _Judge(
        par_L=par_L,
        floor_L=floor_L,
        episode_par_L=np.nan_to_num(par(loads_NLR), nan=1.0),
        episode_floor_L=np.minimum(drawn_L, bound_L),
        volatility_bound_L=bound_L,
        episode_steps=window.steps / episodes,
        bytes_per_expert=asked.topology.bytes_per_expert,
        settings=asked.settings,
        why_ungrouped=why_ungrouped,
    )


_FromScratch = tuple[int, Int32, Int32]
"""Index, placement and tables of a layer as solved from scratch."""


def _solved(
    layer: int, answer: Answer | SolverError, judge: _Judge, asked: Question
) -> tuple[LayerVerdict, LayerPlan | None, _FromScratch | None]:
    """Verdict on a layer by its answer, the change, if it is one, and its solution from scratch."""
    if isinstance(answer, SolverError):
        return judge.unanswered(layer, answer), None, None
    found, fresh, topology = answer.found, answer.fresh, asked.topology
    for candidate in (found, fresh):
        # No layer is switched unless its answer was checked.
        try:
            check_layer(candidate.phy2log_RS, asked.placement.experts)
            check_log2phy(candidate.log2phy_GE, candidate.phy2log_RS, "log2phy", source="source")
        except PlacementError as error:
            return judge.unanswered(layer, str(error)), None, None
    _, first_G, group_R = topology.token_groups()
    width = dealing_width(asked.log2phy_RLE, 3)

    def judged(candidate: Candidate) -> tuple[float, Int32]:
        """Ratio per step of a candidate, and its tables for the host."""
        log2phy_RE = tables_of_sources(candidate.log2phy_GE, first_G.size)[group_R]
        steps = split_steps(*_alone(asked, layer, candidate.phy2log_RS, log2phy_RE))
        return float(par_of_steps(steps)[0]), as_host_deals(log2phy_RE, width)

    hindsight, fresh_RE = judged(fresh)
    from_scratch = layer, fresh.phy2log_RS, fresh_RE
    if answer.taken == KEEP:
        return judge.not_worth_it(layer, answer, hindsight), None, from_scratch
    planned, log2phy_RE = (hindsight, fresh_RE) if found is fresh else judged(found)
    before_RS = asked.placement.phy2log_LRS[layer].copy()
    moves_M5 = choose_senders(before_RS, found.phy2log_RS, topology.nodes_R.copy())
    change = LayerPlan(layer, found.phy2log_RS, log2phy_RE, moves_M5)
    return judge.changed(layer, answer, len(moves_M5), planned, hindsight), change, from_scratch


def _alone(
    asked: Question, layer: int, phy2log_RS: Int32, log2phy_RE: Int32
) -> tuple[Counts, Placement, Int32, Float64 | None, str]:
    """One layer under another placement, as ``split_steps`` and ``split_us`` take it."""
    window, placement = asked.window, Placement(phy2log_RS[None], asked.window.experts)
    source_R1E = None if window.source_RLE is None else window.source_RLE[:, layer, None]
    return window.heat_TLE[:, layer, None], placement, log2phy_RE[:, None], source_R1E, asked.settings.split


def _with_times(
    verdicts: Sequence[LayerVerdict], changed: Sequence[LayerPlan], asked: Question
) -> list[LayerVerdict]:
    """Verdicts with the microseconds of each layer's slowest rank; those that change say so."""
    window, split, curve = asked.window, asked.settings.split, asked.settings.cost_curve
    assert curve is not None
    us_TL = split_us(window.heat_TLE, asked.placement, asked.log2phy_RLE, window.source_RLE, split, curve)
    by_layer = {change.layer: change for change in changed}
    timed = []
    for verdict, seen in zip(verdicts, mean_par(us_TL, axis=0).tolist(), strict=True):
        if np.isnan(seen):
            timed.append(verdict)
            continue
        planned, reason = seen, verdict.reason
        if change := by_layer.get(verdict.layer):
            alone = _alone(asked, change.layer, change.phy2log_RS, change.log2phy_RE)
            planned = float(mean_par(split_us(*alone, curve)))
            reason = f"{reason}; its slowest rank {seen:.1f} us to {planned:.1f}"
        timed.append(replace(verdict, us_seen=seen, us_planned=planned, reason=reason))
    return timed


def _without_slower(
    verdicts: Sequence[LayerVerdict], changed: Sequence[LayerPlan], min_gain: float, price: float
) -> tuple[list[LayerVerdict], list[LayerPlan]]:
    """Leave out changes that were found by tokens and win too little time for themselves and their moves."""
    kept, paying = list(verdicts), []
    for change in changed:
        verdict = verdicts[change.layer]
        seen, planned = verdict.us_seen, verdict.us_planned
        assert seen is not None, "a layer without tokens does not change"
        assert planned is not None
        if seen - planned > (min_gain + price * verdict.moves / change.phy2log_RS.size) * seen:
            paying.append(change)
            continue
        kept[change.layer] = replace(
            verdict,
            par_planned=verdict.par_seen,
            us_planned=seen,
            moves=0,
            bytes=0,
            changed=False,
            optimism=0.0,
            reason=f"kept: what was found, from {verdict.par_seen:.3f} to {verdict.par_planned:.3f}, takes its slowest "
            f"rank {planned:.1f} us in place of {seen:.1f}: too little for {verdict.moves} moves",
        )
    return kept, paying


def _gain(verdict: LayerVerdict) -> float:
    if verdict.us_seen is not None and verdict.us_planned is not None:
        return verdict.us_seen - verdict.us_planned
    return verdict.par_seen - verdict.par_planned
