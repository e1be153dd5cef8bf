"""Decision for one layer under a cost curve: lower the slowest rank's time if the gain exceeds the cost of the moves.

All candidates are judged by their time. They are the current layout, the current placement with new tables, placements
reached from it by swaps, and placements from scratch, either for time or for balanced tokens. On the window, an
accepted placement from scratch is never slower than the current layout or than balanced tokens. Placements for time are
considered only if, when fitted to either half of the window, they are faster than balanced tokens on the other half.

Tokens are balanced as without a curve. If trimmed means forecast better, this means balancing the heat between bursts
(``window``). If the current placement was based on heat, a change must also pay off on the newer half, as in ``layer``.

The search is the same as for tokens, with different input. Once the number of replicas that an expert uses is fixed, so
is the time that each of its slots adds to a rank in each step. These times are placed and swapped like heat
(``construction``, ``local_search``). Unused slots are treated as additional experts without heat. The result is then
judged exactly (``time_costs``), with its tables. In this module, ``Candidate.par`` is the slowest rank's mean time
divided by the time of perfectly even ranks without replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from eplb_core.solver.candidates import (
    MIN_EPISODES,
    from_scratch,
    shares_of,
    without_vain_annealing,
)
from eplb_core.solver.construction import Assignment, assignment_of, place
from eplb_core.solver.layer import LayerResult, is_sure, move_prices
from eplb_core.solver.local_search import local_search
from eplb_core.solver.model import (
    FRESH,
    KEEP,
    LOCAL,
    SOLVED,
    TABLES,
    Bool,
    Candidate,
    Episodes,
    Float32,
    Float64,
    Heat,
    Int32,
    Layer,
    LayerLayout,
    SearchParams,
    episodes_of,
    with_covariance,
)
from eplb_core.solver.tables import fixed_rule, slot_shares, slots_by_expert, solve_tables
from eplb_core.solver.time_costs import (
    cool_tables,
    even_tables,
    mean_slowest,
    one_replica_each,
    rank_us,
    replica_counts_to_try,
    split_us,
    with_all_slots_used,
)
from eplb_core.solver.topology import keep_slots, match_ranks
from eplb_core.solver.window import Forecast, choose_forecast, forecast_heat, standard_error

_NO_FADING = np.array([np.inf])
"""Candidate half-lives that weight all episodes equally."""
_HARDLY = 0.001
"""Minimum saving over balanced tokens on held-out heat, as a fraction of the time of perfectly even ranks."""
_SURE = 2.0
"""Minimum saving over balanced tokens on held-out heat, in standard errors of the saving per step."""
_SEARCHED = 3
"""Number of replica counts whose greedy placement is improved by local search."""
_TABLE_MOVES = 256
"""Maximum number of attempts to move a source when tables are improved."""


class _TimedLayer(NamedTuple):
    """One MoE layer, with the data for computing its time."""

    layer: Layer
    """Heat and current layout, for balancing tokens."""
    tokens_EN: Float32
    """float32 ``[E, N]``, tokens of each expert in each step."""
    weight_N: Float32
    """float32 ``[N]``, weights of the steps: equal for all steps with tokens and 0 for the others. They sum to 1, or to
    0 if no step has tokens."""
    curve_4: Float64
    """float64 ``[4]``, a cost curve; see ``time_costs``."""
    even_us: float
    """Mean time per step of perfectly even ranks without replicas, in microseconds."""

    @property
    def deployed(self) -> LayerLayout:
        """Deployed placement and tables."""
        return self.layer.deployed

    def judged(self, one: Candidate, tables: int) -> Candidate:
        """Return the candidate with its ``par``: the slowest rank's mean time / ``even_us``, or 1.0 without tokens."""
        if not self.weight_N.any():
            return one._replace(par=1.0)
        share_RS = shares_of(one, self.deployed, tables)
        us = mean_slowest(self.tokens_EN, self.weight_N, one.phy2log_RS, share_RS, self.curve_4)
        return one._replace(par=us / self.even_us)

    def slowest_N(self, one: Candidate, tables: int) -> Float32:
        """Return the slowest rank's time in each step with tokens, in microseconds and without the floor, float32."""
        share_RS = shares_of(one, self.deployed, tables)
        us_RN = rank_us(self.tokens_EN, one.phy2log_RS, share_RS, self.curve_4)
        slowest_N: Float32 = us_RN.max(axis=0)[self.weight_N > 0]
        return slowest_N


def solve_layer_for_time(
    episodes_NE: Float64,
    steps_NE: Float64,
    deployed: LayerLayout,
    params: SearchParams,
    curve_4: Float64,
    min_gain: float,
    unplaced: bool,
    half_life_H: Float64 = _NO_FADING,
) -> LayerResult:
    """Decide what to do with one layer.

    Parameters
    ----------
    episodes_NE, steps_NE
        float64 ``[N, E]``, tokens per episode and expert, for balancing tokens, and float64 ``[N', E]``, tokens per
        single step and expert, for lowering time. Both are ordered from oldest to newest.
    deployed, params, min_gain, unplaced, half_life_H
        As for ``layer.solve_layer``, except that ``move_price`` and ``min_gain`` are fractions of the time of even
        ranks.
    curve_4
        float64 ``[4]``, a cost curve; see ``time_costs``.

    Returns
    -------
    LayerResult
        The decision. Its ratios are times of the slowest rank, divided by the time of perfectly even ranks without
        replicas.
    """
    balanced = episodes_of(episodes_NE, deployed.phy2log_RS.shape[0])
    params = without_vain_annealing(balanced, deployed, params)
    forecast = _between_bursts(balanced, params, half_life_H)
    seen = _timed(episodes_NE, steps_NE, deployed, curve_4, forecast)
    now = seen.judged(Candidate(deployed.phy2log_RS, deployed.log2phy_GE, 0.0, 0), params.tables)
    tables = _tabled(deployed.phy2log_RS, seen, params)
    halves = []
    if episodes_NE.shape[0] >= MIN_EPISODES:
        cut = episodes_NE.shape[0] // 2
        step_cut = steps_NE.shape[0] // 2
        halves = [
            _timed(episodes, steps, deployed, curve_4, forecast)
            for episodes, steps in (
                (episodes_NE[:cut], steps_NE[:step_cut]),
                (episodes_NE[cut:], steps_NE[step_cut:]),
            )
        ]
    for_time = _lasts(halves[0], halves[1], params) if halves else True
    slot_price = params.slot_price(deployed.phy2log_RS)
    fresh = min((now, tables, _placed(seen, params, slot_price, for_time)), key=attrgetter("par"))

    def answer(found: Candidate, taken: int) -> LayerResult:
        return LayerResult(found, now.par, float("inf"), taken, trimmed=forecast.trimmed)

    if unplaced:
        return answer(fresh, KEEP if fresh is now else TABLES if fresh is tables else FRESH)
    if now.par - fresh.par <= min_gain:
        return answer(now, KEEP)
    slot_price = params.slot_price(deployed.phy2log_RS, now.par)
    most = FRESH
    if params.options.holdout and halves:
        older, newer = halves
        judged = [
            (newer.judged(one, params.tables), kind)
            for one, kind in _recommendations(older, now, params, slot_price, FRESH, for_time)
            if _surely_pays(one, now, newer, params, slot_price)
        ]
        limit = newer.judged(now, params.tables).par - min_gain
        _, most = _cheapest(judged, now, slot_price, limit)
    recommendations = _recommendations(seen, now, params, slot_price, most, for_time)
    return answer(*_cheapest(recommendations, now, slot_price, now.par - min_gain))


def _timed(
    episodes_NE: Float64, steps_NE: Float64, deployed: LayerLayout, curve_4: Float64, forecast: Forecast
) -> _TimedLayer:
    """Return a layer with its steps, and compute the time of perfectly even ranks."""
    ranks = deployed.phy2log_RS.shape[0]
    layer = Layer(forecast_heat(episodes_of(episodes_NE, ranks), forecast, 0.0), deployed)
    busy_N = steps_NE.sum(axis=1) > 0
    weight_N = (busy_N / max(1, np.count_nonzero(busy_N))).astype(np.float32)
    tokens_EN = np.ascontiguousarray(steps_NE.T, dtype=np.float32)
    us_EN = split_us(tokens_EN, np.ones(tokens_EN.shape[0], dtype=np.int32), curve_4)
    even_us = float(curve_4[0]) + float((us_EN.sum(axis=0) * weight_N).sum()) / ranks
    return _TimedLayer(layer, tokens_EN, weight_N, curve_4, even_us)


def _between_bursts(heat: Episodes, params: SearchParams, half_life_H: Float64) -> Forecast:
    """Return the forecast for balancing tokens: trimmed means on bursty heat, otherwise equally weighted episodes."""
    if heat.share_N.size >= MIN_EPISODES:
        chosen = choose_forecast(heat, half_life_H, params.options.trimmed_mean)
        if chosen.trimmed:
            return chosen
    return Forecast(float("inf"), 0.0)


def _lasts(older: _TimedLayer, newer: _TimedLayer, params: SearchParams) -> bool:
    """Return True if placements for time, fitted to either half, are clearly faster than balanced tokens on the other.

    Fitting only to the older half is not enough. If heat drifts, two placements that are equally fast on one segment
    can differ on another by more than the scatter between its steps.
    """
    if not (older.weight_N.any() and newer.weight_N.any()):
        return True
    for fit, held_out in ((older, newer), (newer, older)):
        balanced = from_scratch(fit.layer, params, params.slot_price(fit.deployed.phy2log_RS))
        found = _placed_for_time(fit, params)
        saved_N = held_out.slowest_N(balanced, params.tables) - held_out.slowest_N(found, params.tables)
        error = standard_error(saved_N.astype(np.float64))
        if saved_N.mean() <= max(_HARDLY * held_out.even_us, _SURE * error):
            return False
    return True


def _placed(seen: _TimedLayer, params: SearchParams, slot_price: float, for_time: bool) -> Candidate:
    """Place a layer from scratch: for time if ``for_time`` is set and this is faster, otherwise for balanced tokens."""
    balanced = seen.judged(from_scratch(seen.layer, params, slot_price), params.tables)
    if not for_time:
        return balanced
    return min(balanced, _placed_for_time(seen, params), key=attrgetter("par"))


def _recommendations(
    seen: _TimedLayer, now: Candidate, params: SearchParams, slot_price: float, most: int, for_time: bool
) -> list[tuple[Candidate, int]]:
    """Return the candidates of the actions ``TABLES``, ``LOCAL`` and ``FRESH`` up to ``most``, each with its action."""
    if most == KEEP:
        return []
    tables = _tabled(now.phy2log_RS, seen, params)
    found = [(tables, TABLES)]
    if most >= LOCAL and params.local_search_steps > 0:
        # The search measures times without the floor, so prices relative to ``even_us`` are scaled up to match.
        scale = seen.even_us / max(seen.even_us - seen.curve_4[0], 1e-30)
        price_K = move_prices(slot_price * scale, params)
        found += [(one, LOCAL) for one in _improved_for_time(tables, seen, params, price_K)]
    if most == FRESH:
        found.append((_placed(seen, params, slot_price, for_time), FRESH))
    return found


def _surely_pays(
    one: Candidate, now: Candidate, newer: _TimedLayer, params: SearchParams, slot_price: float
) -> bool:
    """Return True if the gain on the newer steps exceeds the cost of the moves by ``sureness`` standard errors."""
    weight_N = newer.weight_N[newer.weight_N > 0]
    saved_N = newer.slowest_N(now, params.tables) - newer.slowest_N(one, params.tables)
    return is_sure(saved_N / newer.even_us, weight_N, slot_price * one.moves, params.options.sureness)


def _cheapest(
    found: Sequence[tuple[Candidate, int]], now: Candidate, slot_price: float, limit: float
) -> tuple[Candidate, int]:
    """Return the cheapest candidate and its action, or ``now`` and ``KEEP`` if no cost is below ``limit``.

    The cost is ``par`` plus the price of the moves. If several candidates have the same cost, the first one is chosen.
    """
    best = now
    taken = KEEP
    for one, kind in found:
        cost = one.par + slot_price * one.moves
        if cost < limit:
            best = one
            taken = kind
            limit = cost
    return best, taken


def _tabled(
    phy2log_RS: Int32, seen: _TimedLayer, params: SearchParams, used_RE: Bool | None = None
) -> Candidate:
    """Return a candidate for a placement: keep experts in their deployed slots, and choose the fastest tables.

    The search for tables starts from an even split over the replicas in ``used_RE``, bool ``[R, E]``. If it is
    ``None``, there are two starting points: one replica of each expert, and the tables that balance tokens.
    """
    share_GE = seen.deployed.share_GE
    sources, experts = share_GE.shape
    kept_RS, moves = keep_slots(phy2log_RS, seen.deployed.phy2log_RS)
    if params.tables != SOLVED:
        rule_GE = fixed_rule(*slots_by_expert(kept_RS, experts), sources, params.width)
        return seen.judged(Candidate(kept_RS, rule_GE, 0.0, moves), params.tables)
    beginnings = []
    if used_RE is None:
        beginnings.append(solve_tables(kept_RS, seen.layer.heat, share_GE, params.z)[0])
        us_E = split_us(seen.tokens_EN, np.ones(experts, dtype=np.int32), seen.curve_4) @ seen.weight_N
        used_RE = one_replica_each(kept_RS, experts, us_E.astype(np.float32))
    # ``min`` returns the first of several equal candidates, so the tables that use the fewest replicas come first.
    beginnings.insert(0, even_tables(*_slots_in_use(kept_RS, used_RE), share_GE))
    found = []
    for table_GE in beginnings:
        cool_tables(kept_RS, table_GE, seen.tokens_EN, seen.weight_N, share_GE, seen.curve_4, _TABLE_MOVES)
        found.append(seen.judged(Candidate(kept_RS, table_GE, 0.0, moves), SOLVED))
    return min(found, key=attrgetter("par"))


def _placed_for_time(seen: _TimedLayer, params: SearchParams) -> Candidate:
    """Place from scratch for time: try several replica counts, and match the placements to the current ranks.

    All counts are placed greedily. The most promising placements are then improved by local search.
    """
    (ranks, slots), steps = seen.deployed.phy2log_RS.shape, params.local_search_steps
    timing = seen.tokens_EN, seen.weight_N, seen.curve_4
    begun: list[tuple[float, Assignment, Heat, Int32]] = []
    for replicas_E in replica_counts_to_try(*timing, ranks, slots, params.z):
        if params.tables != SOLVED:
            replicas_E = with_all_slots_used(*timing, replicas_E, ranks, slots)
        heat, unused = _heat_in_time(seen, replicas_E)
        padded_E = np.concatenate([replicas_E, np.ones(unused, dtype=np.int32)])
        assignment = place(padded_E, heat, ranks, slots, params.z)
        begun.append((_greedy_us(assignment, replicas_E, seen), assignment, heat, replicas_E))
    begun.sort(key=lambda one: one[0])
    found = []
    for _, assignment, heat, replicas_E in begun[:_SEARCHED]:
        nowhere_ER = np.zeros_like(assignment.holds_ER)
        found_KRS = local_search(assignment, heat, nowhere_ER, np.zeros(1), params.z, steps, False)
        used_RE = _used(found_KRS[0], replicas_E.size)
        found.append(_served(_dealt(used_RE, seen), seen, params))
    return min(found, key=attrgetter("par"))


def _improved_for_time(
    now: Candidate, seen: _TimedLayer, params: SearchParams, price_K: Float64
) -> list[Candidate]:
    """Improve the deployed placement by swaps and return the distinct results, at most one per move price.

    ``now`` is the deployed placement with its best tables.
    """
    deployed = seen.deployed
    ranks = now.phy2log_RS.shape[0]
    experts = deployed.share_GE.shape[1]
    in_use_RS = slot_shares(now.phy2log_RS, now.log2phy_GE, deployed.share_GE) > 0
    if params.tables != SOLVED:
        in_use_RS[:] = True
    replicas_E = np.bincount(now.phy2log_RS[in_use_RS], minlength=experts).astype(np.int32)
    # An expert without tokens is not in use, but still needs a slot.
    silent_E = replicas_E == 0
    for expert in np.flatnonzero(silent_E):
        in_use_RS[tuple(np.argwhere(now.phy2log_RS == expert)[0])] = True
    replicas_E[silent_E] = 1
    heat, unused = _heat_in_time(seen, replicas_E)
    begin_RS = now.phy2log_RS.copy()
    begin_RS[~in_use_RS] = experts + np.arange(unused)
    padded_E = np.concatenate([replicas_E, np.ones(unused, dtype=np.int32)])
    share_RS = (1.0 / padded_E[begin_RS]).astype(np.float32)
    home_ER = np.concatenate([deployed.home_ER, np.ones((unused, ranks), dtype=np.bool_)])
    assignment = assignment_of(begin_RS, share_RS, heat)
    steps = params.local_search_steps
    found_KRS = local_search(assignment, heat, home_ER, price_K, params.z, steps, False)
    distinct = {
        found_RS.tobytes(): found_RS for found_RS in found_KRS if not np.array_equal(found_RS, begin_RS)
    }
    return [_served(_used(found_RS, experts), seen, params) for found_RS in distinct.values()]


def _greedy_us(assignment: Assignment, replicas_E: Int32, seen: _TimedLayer) -> float:
    """Return the slowest rank's mean time if each expert's replicas in use get even shares, in microseconds."""
    share_E = np.zeros(assignment.replicas_E.size, dtype=np.float32)
    share_E[: replicas_E.size] = 1.0 / replicas_E
    used_RS = np.minimum(assignment.phy2log_RS, np.int32(replicas_E.size - 1))
    share_RS = share_E[assignment.phy2log_RS]
    return mean_slowest(seen.tokens_EN, seen.weight_N, used_RS, share_RS, seen.curve_4)


def _heat_in_time(seen: _TimedLayer, replicas_E: Int32) -> tuple[Heat, int]:
    """Return the experts' times as heat, scaled to a mean rank load of 1, and the number of unused slots.

    Each expert's tokens are split evenly over its ``replicas_E`` replicas. Every unused slot is represented by an
    additional expert without heat.
    """
    ranks, slots = seen.deployed.phy2log_RS.shape
    us_EN = split_us(seen.tokens_EN, replicas_E, seen.curve_4)
    unused = ranks * slots - int(replicas_E.sum())
    scale = ranks / max(float((us_EN.sum(axis=0) * seen.weight_N).sum()), 1e-30)
    padded_EN = np.zeros((us_EN.shape[0] + unused, us_EN.shape[1]), dtype=np.float32)
    padded_EN[: us_EN.shape[0]] = us_EN * np.float32(scale)
    return with_covariance(padded_EN, seen.weight_N), unused


def _used(found_RS: Int32, experts: int) -> Bool:
    """Return the experts that each rank uses, bool ``[R, E]``; numbers >= ``experts`` represent unused slots."""
    used_RE = np.zeros((found_RS.shape[0], experts), dtype=np.bool_)
    rank_U, slot_U = np.nonzero(found_RS < experts)
    used_RE[rank_U, found_RS[rank_U, slot_U]] = True
    return used_RE


def _slots_in_use(phy2log_RS: Int32, used_RE: Bool) -> tuple[Int32, Int32]:
    """Return the physical ids of the replicas in use, grouped by expert as in ``tables.slots_by_expert``."""
    expert_P = phy2log_RS.ravel()
    slot_U = np.flatnonzero(used_RE[np.arange(len(phy2log_RS))[:, None], phy2log_RS])
    used_E = np.bincount(expert_P[slot_U], minlength=used_RE.shape[1])
    first_E1 = np.concatenate(([0], used_E.cumsum())).astype(np.int32)
    return first_E1, slot_U[np.argsort(expert_P[slot_U], kind="stable")].astype(np.int32)


def _dealt(used_RE: Bool, seen: _TimedLayer) -> Bool:
    """Assign each row of ``used_RE`` to the rank that already holds most of its experts."""
    deployed = seen.deployed
    full_RS = _completed(used_RE, np.zeros_like(used_RE), seen)
    dealt_RS = match_ranks(full_RS, deployed.phy2log_RS, used_RE.shape[1], deployed.node_R)
    rows: dict[bytes, list[int]] = {}
    for rank, row_S in enumerate(full_RS):
        rows.setdefault(row_S.tobytes(), []).append(rank)
    return used_RE[[rows[row_S.tobytes()].pop() for row_S in dealt_RS]]


def _served(used_RE: Bool, seen: _TimedLayer, params: SearchParams) -> Candidate:
    """Return a candidate that uses the replicas in ``used_RE`` and keeps deployed experts in unused slots."""
    return _tabled(_completed(used_RE, seen.deployed.home_ER.T, seen), seen, params, used_RE)


def _completed(used_RE: Bool, there_RE: Bool, seen: _TimedLayer) -> Int32:
    """Fill all slots and return the placement, int32 ``[R, S]``.

    Each rank gets its experts in use first, then those marked in ``there_RE``, then the hottest experts.
    """
    slots = seen.deployed.phy2log_RS.shape[1]
    heat_E = seen.tokens_EN @ seen.weight_N
    rank_of_E = np.empty(heat_E.size)
    rank_of_E[np.argsort(-heat_E, kind="stable")] = np.arange(heat_E.size)
    order_RE = np.where(used_RE, -2 * heat_E.size, np.where(there_RE, -heat_E.size, 0)) + rank_of_E
    full_RS: Int32 = np.argsort(order_RE, axis=1, kind="stable")[:, :slots].astype(np.int32)
    return full_RS
