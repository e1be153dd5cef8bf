"""Models of newer classes of balancers. No package on the index provides such a balancer.

The models are implemented from published descriptions. They place the experts in order, permanently, and use only the
remaining slots for replicas. The engines of these classes differ in details, so the figures show what a class can
achieve, not what an engine achieves.

References
----------
UltraEP 1.0, and the global expert pool of vllm-ascend (https://github.com/vllm-project/vllm-ascend/pull/15668).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Placement, mean_par
from eplb_core.solver.jit import kernel
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.decision import Float64, Int32
from eplb_lab.bench.scoring import peak_to_average, whole_loads

Bool = npt.NDArray[np.bool_]
Outcome = Iterator[tuple[float, int]]
"""For each decision, the PAR of the steps served, and the number of experts fetched."""


def exact_refresh(scenario: Scenario) -> Outcome:
    """Choose new replicas for each layer of each step from that step's exact counts, like UltraEP.

    All layers share the memory for replicas, so every replica is fetched again in each step.
    """
    home_ER = _homes(scenario)
    spare = scenario.slots - int(home_ER.sum(axis=0).max())
    for number in range(scenario.decisions):
        served_TLE = scenario.served(number).astype(np.int64)
        par_L, fetched = [], 0
        for layer in range(served_TLE.shape[1]):
            heat_TE = np.ascontiguousarray(served_TLE[:, layer])
            load_TR = np.empty((len(heat_TE), scenario.ranks))
            fetched += refresh_steps(heat_TE, home_ER, spare, load_TR)
            par_L.append(peak_to_average(load_TR))
        yield float(mean_par(np.array(par_L))), fetched


@kernel
def refresh_steps(heat_TE: npt.NDArray[np.int64], home_ER: Bool, spare: int, load_TR: Float64) -> int:
    """Replicate one layer's experts for each step, and return the number of replicas.

    Parameters
    ----------
    heat_TE
        int64 ``[T, E]``, tokens of each step.
    home_ER
        bool ``[E, R]``, True for the one rank that always holds an expert.
    spare
        Slots for replicas on each rank.
    load_TR
        float64 ``[T, R]``, output: tokens of each rank after replication.
    """
    experts, ranks = home_ER.shape
    fetched = 0
    flow_ER = np.empty((experts, ranks))
    held_ER = np.empty((experts, ranks), dtype=np.bool_)
    free_R = np.empty(ranks, dtype=np.int64)
    for t in range(heat_TE.shape[0]):
        load_R = load_TR[t]
        for r in range(ranks):
            load_R[r] = 0.0
            free_R[r] = spare
            for e in range(experts):
                held_ER[e, r] = home_ER[e, r]
                flow_ER[e, r] = heat_TE[t, e] if home_ER[e, r] else 0.0
                load_R[r] += flow_ER[e, r]
        fetched += _level(flow_ER, held_ER, free_R, load_R)
    return fetched


@kernel
def _level(flow_ER: Float64, held_ER: Bool, free_R: npt.NDArray[np.int64], load_R: Float64) -> int:
    """Balance the ranks' loads in place, and return the number of replicas added.

    Each iteration moves tokens of one expert from the hottest rank to a rank that holds a replica of the expert or has
    a free slot. It picks the move with the most tokens for which neither rank's load crosses the mean.
    """
    experts, ranks = flow_ER.shape
    total = 0.0
    for r in range(ranks):
        total += load_R[r]
    target = np.ceil(total / ranks)
    fetched = 0
    while True:
        hot = 0
        for r in range(ranks):
            if load_R[r] > load_R[hot]:
                hot = r
        best = 0.0
        best_expert = 0
        best_rank = 0
        for e in range(experts):
            if flow_ER[e, hot] <= best:
                continue
            for r in range(ranks):
                if held_ER[e, r] or free_R[r] > 0:
                    tokens = min(load_R[hot] - target, target - load_R[r], flow_ER[e, hot])
                    if tokens > best:
                        best = tokens
                        best_expert = e
                        best_rank = r
        if best <= 0.0:
            return fetched
        flow_ER[best_expert, hot] -= best
        flow_ER[best_expert, best_rank] += best
        load_R[hot] -= best
        load_R[best_rank] += best
        if not held_ER[best_expert, best_rank]:
            held_ER[best_expert, best_rank] = True
            free_R[best_rank] -= 1
            fetched += 1


def shared_pool(scenario: Scenario) -> Outcome:
    """Share each rank's spare slots among the layers, according to the window's mean heat (vllm-ascend #16871).

    The total memory is the same as for the other policies, but a layer that gains more gets more slots.
    """
    home_ER = _homes(scenario)
    layers = scenario.heat_TLE.shape[1]
    slots = layers * (scenario.slots - int(home_ER.sum(axis=0).max()))
    before_LER = np.broadcast_to(home_ER, (layers, *home_ER.shape))
    for number in range(scenario.decisions):
        held_LER = pooled(scenario.heat(number).mean(axis=0), home_ER, slots)
        served_TLE = scenario.served(number)
        share_LER = held_LER / held_LER.sum(axis=2, keepdims=True)
        par_L = [
            peak_to_average(whole_loads(served_TLE[:, layer], share_ER))
            for layer, share_ER in enumerate(share_LER)
        ]
        yield float(mean_par(np.array(par_L))), int((held_LER & ~before_LER).sum())
        before_LER = held_LER


def pooled(heat_LE: Float64, home_ER: Bool, slots: int) -> Bool:
    """Return the ranks that hold each expert of each layer, bool ``[L, E, R]``.

    Replicas are added one by one. Each is the one that most reduces the load of a layer's hottest rank. An expert's
    tokens are split evenly over its replicas.

    Parameters
    ----------
    heat_LE
        float64 ``[L, E]``, mean tokens per step.
    home_ER
        bool ``[E, R]``, True for the one rank that always holds an expert.
    slots
        Number of slots for replicas on each rank, shared by all layers.

    Examples
    --------
    Layer 0 is balanced, so layer 1 gets both replicas:

    >>> home_ER = np.array([[True, False], [False, True]])
    >>> pooled(np.array([[5.0, 5.0], [8.0, 2.0]]), home_ER, slots=1)[:, 0].tolist()
    [[True, False], [True, True]]
    """
    held_LER = np.repeat(home_ER[None], len(heat_LE), axis=0)
    free_R = np.full(home_ER.shape[1], slots)
    best_of_layer = [
        _best_replica(heat_E, held_ER, free_R) for heat_E, held_ER in zip(heat_LE, held_LER, strict=True)
    ]
    while True:
        layer = max(range(len(heat_LE)), key=lambda number: best_of_layer[number][0])
        gain, expert, rank = best_of_layer[layer]
        if gain <= 0:
            return held_LER
        if free_R[rank] > 0:
            held_LER[layer, expert, rank] = True
            free_R[rank] -= 1
        # If another layer has filled the chosen rank, no replica is added and this layer only chooses again.
        best_of_layer[layer] = _best_replica(heat_LE[layer], held_LER[layer], free_R)


def _best_replica(heat_E: Float64, held_ER: Bool, free_R: npt.NDArray[np.int64]) -> tuple[float, int, int]:
    """Return the largest reduction of the hottest rank's load by one replica, the replica's expert, and its rank."""
    count_E = held_ER.sum(axis=1)
    load_R = (heat_E / count_E) @ held_ER
    hottest = int(load_R.argmax())
    best = (0.0, 0, 0)
    for expert in np.flatnonzero(held_ER[:, hottest] & (heat_E > 0)).tolist():
        share = heat_E[expert] / (count_E[expert] + 1)
        others_R = load_R - held_ER[expert] * (heat_E[expert] / count_E[expert] - share)
        for rank in np.flatnonzero((free_R > 0) & ~held_ER[expert]).tolist():
            peak = max(float(others_R.max()), float(others_R[rank] + share))
            best = max(best, (float(load_R[hottest]) - peak, expert, rank), key=lambda found: found[0])
    return best


def _homes(scenario: Scenario) -> Bool:
    """Return, for each expert, the one rank that always holds it, bool ``[E, R]``. Experts are placed in order."""
    experts = scenario.heat_TLE.shape[2]
    placed_RS: Int32 = Placement.linear(
        1, experts, scenario.ranks, -(-experts // scenario.ranks)
    ).phy2log_LRS[0]
    home_ER = np.zeros((experts, scenario.ranks), dtype=np.bool_)
    for rank, experts_S in enumerate(placed_RS):
        for expert in experts_S.tolist():
            home_ER[expert, rank] |= not home_ER[expert].any()
    return home_ER


MODELS: Mapping[str, Callable[[Scenario], Outcome]] = {
    "exact refresh (model)": exact_refresh,
    "shared pool (model)": shared_pool,
}
"""Models by their name in tables and JSON."""
