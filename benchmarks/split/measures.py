"""PAR on the window after a decision, for three kinds of placement and five splits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.solver.heats import generate
from eplb_core.placement import Placement, with_entries
from eplb_core.solver.model import Int64
from eplb_core.solver.stepwise import level, loads_by_step, replicas_in, split_evenly
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.scoring import peak_to_average
from eplb_service.io.routes import DEFAULT_BATCH, steps_and_places
from eplb_service.offline import Solution, solve
from worker_agent.stepwise import StepwiseSplit

FOR_EVEN = "made for even shares"
FOR_STEPS = "made for the stepwise split"
PLACEMENTS = {
    "DeepSeek's EPLB": {"policy": "deepseek", "split": "even"},
    FOR_EVEN: {"split": "even"},
    FOR_STEPS: {"split": "step"},
}
EVEN_SHARES, RANDOM, LPLB, STEPWISE, OPTIMUM = SPLITS = (
    "even shares",
    "a random replica per token",
    "LP shares, drawn (LPLB)",
    "stepwise",
    "optimum",
)


def quality(scenario: Scenario, window: int, windows: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Yield a row per placement with each split's PAR, averaged over layers and windows.

    Each placement is made on one window and measured on the next.

    Parameters
    ----------
    scenario
        Heat to place.
    window
        Steps per window.
    windows
        Number of windows.
    seed
        Seed for the splits that draw a replica per token.
    """
    generator = np.random.default_rng(seed)
    heat_TLE = scenario.heat_TLE.astype(np.int64)
    for name, options in PLACEMENTS.items():
        ratios: dict[str, list[float]] = {split: [] for split in SPLITS}
        for start in starts_of(len(heat_TLE), window, windows):
            seen_TLE = heat_TLE[start : start + window]
            next_TLE = heat_TLE[start + window : start + 2 * window]
            placed_LRS = solve(seen_TLE, scenario.ranks, scenario.slots, **options).phy2log
            for layer, placed_RS in enumerate(placed_LRS):
                for split, loads_TR in loads(placed_RS, next_TLE[:, layer], generator).items():
                    ratios[split].append(peak_to_average(loads_TR))
        yield {"placement": name, **{split: float(np.mean(found)) for split, found in ratios.items()}}


def decision_cpu(scenario: Scenario, window: int, windows: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds per layer of decisions for tables and for the stepwise split, one per window.

    Each figure is the mean of two decisions: a placement from scratch, and one that starts from it on the next window.
    Both splits decide in turn in the same process, on one thread.
    """
    heat_TLE = scenario.heat_TLE.astype(np.int64)
    milliseconds: dict[str, list[float]] = {split: [] for split in ("tables", "step")}
    for start in [0, *starts_of(len(heat_TLE), window, windows)]:
        seen_TLE = heat_TLE[start : start + window]
        next_TLE = heat_TLE[start + window : start + 2 * window]
        for split, found in milliseconds.items():
            began = time.thread_time()
            first = solve(seen_TLE, scenario.ranks, scenario.slots, split=split, threads=1)
            layout = {"placement": first.phy2log, "log2phy": first.log2phy}
            solve(next_TLE, scenario.ranks, scenario.slots, split=split, threads=1, **layout)
            found.append((time.thread_time() - began) * 1e3 / (2 * heat_TLE.shape[1]))
    # The first window is also measured once in advance, to load the kernels. Drop that measurement.
    return {split: found[1:] for split, found in milliseconds.items()}


def starts_of(steps: int, window: int, windows: int) -> list[int]:
    """Return the first steps of ``windows`` windows, spread evenly so that each is followed by a full window.

    Examples
    --------
    >>> starts_of(steps=100, window=20, windows=3)
    [0, 30, 60]
    """
    return [int(at) for at in np.linspace(0, steps - 2 * window, windows)]


def loads(
    placed_RS: np.ndarray, heat_TE: np.ndarray, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the tokens of each rank in each step, ``[T, R]``, with each of ``SPLITS``."""
    ranks, slots = placed_RS.shape
    placed_RS = np.ascontiguousarray(placed_RS, dtype=np.int32)
    experts = heat_TE.shape[1]
    replicas = replicas_in(placed_RS, experts)
    split = StepwiseSplit(placed_RS, experts)
    loads_by_split: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS[:-1]}
    for heat_E in heat_TE:
        even_P = np.empty(ranks * slots)
        best_P = np.empty(ranks * slots)
        load_R = np.empty(ranks)
        split_evenly(replicas, heat_E.astype(np.float64), even_P, load_R, False)
        loads_by_split[EVEN_SHARES].append(load_R.copy())
        loads_by_split[RANDOM].append(_drawn(replicas, heat_E, even_P, ranks, generator))
        split_evenly(replicas, heat_E.astype(np.float64), best_P, load_R, False)
        level(replicas, best_P, load_R, False)
        loads_by_split[LPLB].append(_drawn(replicas, heat_E, best_P, ranks, generator))
        loads_by_split[STEPWISE].append(stepwise_loads(split, heat_E, ranks, slots))
    stacked = {name: np.stack(rows) for name, rows in loads_by_split.items()}
    stacked[OPTIMUM] = loads_by_step(heat_TE[:, None], placed_RS[None], True)[:, 0]
    return stacked


def stepwise_loads(split: StepwiseSplit, heat_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Return the tokens that the live layer's split assigns to each rank, ``[R]``."""
    choices = int(heat_E.sum())
    ends_P = split.ends(torch.from_numpy(np.ascontiguousarray(heat_E)), choices).numpy()
    rank_P = split.physical_P1[:-1].numpy() // slots
    return np.bincount(rank_P, np.diff(ends_P, prepend=0), minlength=ranks)


def _drawn(
    replicas: object, heat_E: np.ndarray, flow_P: np.ndarray, ranks: int, generator: np.random.Generator
) -> np.ndarray:
    """Assign each token to a random replica of its expert, with the replicas' shares as probabilities."""
    load_R = np.zeros(ranks)
    for e, tokens in enumerate(heat_E):
        slot_K = replicas.slot_P[replicas.first_E1[e] : replicas.first_E1[e + 1]]  # type: ignore[attr-defined]
        if tokens:
            share_K = np.maximum(flow_P[slot_K], 0.0)
            drawn_K = generator.multinomial(tokens, share_K / share_K.sum())
            np.add.at(load_R, replicas.rank_P[slot_K], drawn_K)  # type: ignore[attr-defined]
    return load_R


GREEDY, RULE, SOLVED, ROUND, DEALT = TABLES = (
    "DeepSeek's EPLB, by rank % replicas",
    "by rank % replicas",
    "solved",
    "dealt to the replicas in turn",
    "dealt, solved",
)


def by_source(
    source_TRLE: np.ndarray, slots: int, window: int, windows: int, width: int
) -> dict[str, list[float]]:
    """Return the PAR of each window with each of ``TABLES``, averaged over the layers.

    The tables are made on one window and measured on the next.

    Parameters
    ----------
    source_TRLE
        Source heat of each step, ``[T, R, L, E]``.
    slots
        Slots per rank.
    window
        Steps per window.
    windows
        Number of windows.
    width
        Number of entries per expert in dealing tables.
    """
    ratios_by_table: dict[str, list[float]] = {name: [] for name in TABLES}
    for start in starts_of(len(source_TRLE), window, windows):
        seen_TRLE = source_TRLE[start : start + window].astype(np.int64)
        next_TRLE = source_TRLE[start + window : start + 2 * window].astype(np.int64)
        for name, (phy2log_LRS, table_RLED) in tables_made(seen_TRLE, slots, width):
            ratios = [
                peak_to_average(loads_by_table(phy2log_RS, table_RLED[:, layer], next_TRLE[:, :, layer]))
                for layer, phy2log_RS in enumerate(phy2log_LRS)
            ]
            ratios_by_table[name].append(float(np.mean(ratios)))
    return ratios_by_table


def tables_made(
    seen_TRLE: np.ndarray, slots: int, width: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield each of ``TABLES`` with its placement ``[L, R, S]`` and its tables ``[R, L, E, D]`` for one window."""
    ranks = seen_TRLE.shape[1]
    experts = seen_TRLE.shape[3]

    def solved(**options: str) -> Solution:
        heat_TLE = seen_TRLE.sum(axis=1)
        return solve(heat_TLE, ranks, slots, source_heat=seen_TRLE, deal_width=width, **options)

    def by_rule(solution: Solution, entries: int) -> tuple[np.ndarray, np.ndarray]:
        table_RLE = Placement(solution.phy2log, experts).default_log2phy(entries)
        return solution.phy2log, with_entries(table_RLE, 3)

    yield GREEDY, by_rule(solved(policy="deepseek", split="tables"), 1)
    for split, rule, label, entries in (("tables", RULE, SOLVED, 1), ("deal", ROUND, DEALT, width)):
        solution = solved(split=split)
        yield rule, by_rule(solution, entries)
        yield label, (solution.phy2log, with_entries(solution.log2phy, 3))


def drawn_sources(scenario: Scenario, seed: int = 0) -> np.ndarray:
    """Draw the source heat of each step, int64 ``[T, R, L, E]``, with a uniformly random source for every token."""
    generator = np.random.default_rng(seed)
    heat_TLE = scenario.heat_TLE.astype(np.int64)
    ranks = scenario.ranks
    mix_LER = np.full((*heat_TLE.shape[1:], ranks), 1 / ranks)
    drawn_TLER = generator.multinomial(heat_TLE, np.broadcast_to(mix_LER, (len(heat_TLE), *mix_LER.shape)))
    return np.moveaxis(drawn_TLER, -1, 1)


def loads_by_table(phy2log_RS: np.ndarray, table_RED: np.ndarray, source_TRE: np.ndarray) -> np.ndarray:
    """Return the tokens of each rank in each step, ``[T, R]``.

    A source's ``i``-th token for an expert goes to entry ``i % D`` of its table.

    Examples
    --------
    One source sends 5 tokens to an expert with replicas in slots 0 and 1, one slot per rank:

    >>> loads_by_table(np.array([[0], [0]]), np.array([[[0, 1]]]), np.array([[[5]]])).tolist()
    [[3.0, 2.0]]
    """
    ranks, slots = phy2log_RS.shape
    width = table_RED.shape[2]
    # Entry k receives tokens number k, k + D, k + 2 D, and so on.
    tokens_TRED = (source_TRE[..., None] + width - 1 - np.arange(width)) // width
    rank_RED = table_RED // slots
    return np.stack(
        [np.bincount(rank_RED.ravel(), tokens_RED.ravel(), minlength=ranks) for tokens_RED in tokens_TRED]
    )


ROUNDS = (10, 16, 22, 30, 42, 100)
CALLS = 200
_EXPERTS = 256
_CHOICES = 8
_TARGET_SPLITS = ("even", "step")
"""Splits for which placements are made. Half of the placements are made for each."""


def tokens_above(split: StepwiseSplit, placed_RS: np.ndarray, heat_TE: np.ndarray) -> list[float]:
    """Return by how many tokens each step's hottest rank exceeds the linear program's optimum.

    The linear program may divide a token over several replicas.
    """
    best_T = loads_by_step(heat_TE[:, None], placed_RS[None], False)[:, 0].max(axis=1)
    hottest = (stepwise_loads(split, heat_E, *placed_RS.shape).max() for heat_E in heat_TE)
    return [float(tokens - best) for tokens, best in zip(hottest, best_T, strict=True)]


def within_a_token(above: Sequence[float]) -> float:
    """Return the fraction of steps that are within one token of the linear program's optimum."""
    return float(np.mean(np.array(above) <= 1 + 1e-6))


def cost(ranks: int, slots: int, tokens: int, layers: int = 4, steps: int = 64) -> Iterator[dict[str, Any]]:
    """Yield a row per number of rounds, with each step's tokens above the optimum and each call's CPU microseconds.

    Half of the layers are placed for even shares and half for the stepwise split, on steps that are not measured.

    Parameters
    ----------
    ranks
        Number of ranks.
    slots
        Slots per rank.
    tokens
        Tokens per step.
    layers
        Number of layers.
    steps
        Number of steps measured per layer.
    """
    heat_TLE = generate("static", layers, _EXPERTS, 2 * steps, tokens=tokens).astype(np.int64)
    rows: dict[int, dict[str, Any]] = {rounds: {"rounds": rounds, "above": [], "us": []} for rounds in ROUNDS}
    for layer in range(layers):
        target_split = _TARGET_SPLITS[2 * layer // layers]
        placed_RS = solve(heat_TLE[:steps, layer : layer + 1], ranks, slots, split=target_split).phy2log[0]
        splits = {rounds: StepwiseSplit(placed_RS, _EXPERTS, rounds=rounds) for rounds in ROUNDS}
        for rounds, split in splits.items():
            rows[rounds]["above"] += tokens_above(split, placed_RS, heat_TLE[steps:, layer])
        # Time every round count on the same layer, so that other load on the machine affects them equally.
        counts_E = torch.from_numpy(heat_TLE[-1, layer])
        for rounds, split in splits.items():
            rows[rounds]["us"] += microseconds(split, counts_E)
    yield from rows.values()


@torch.no_grad()
def microseconds(split: StepwiseSplit, counts_E: torch.Tensor) -> list[float]:
    """Return the CPU microseconds of each of ``CALLS`` calls on one thread, after 50 calls to warm up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for call in range(CALLS + 50):
            began = time.thread_time()
            split.ends(counts_E)
            if call >= 50:
                times.append((time.thread_time() - began) * 1e6)
    finally:
        torch.set_num_threads(threads)
    return times


TOKENS = (256, 1024, 4096, 16384, 65536)
RANKS = ((8, 33), (32, 9), (64, 5))
"""Rank counts with slots per rank, which leave one spare slot per rank for 256 experts."""
DRAWN = "drawn"
SKEWED = "skewed"


@dataclass(frozen=True)
class Exactness:
    """Number of tokens above the optimum for one kind of step, with the default number of rounds.

    Parameters
    ----------
    ranks
        Number of ranks.
    slots
        Slots per rank.
    tokens
        Tokens per step.
    popularity
        ``DRAWN`` or ``SKEWED``.
    above
        Number of tokens above the optimum, one value per step.
    """

    ranks: int
    slots: int
    tokens: int
    popularity: str
    above: list[float]


def exactness(steps: int = 32) -> Iterator[Exactness]:
    """Measure the exactness of the stepwise split for each rank count, token count and popularity.

    One placement is made for even shares and one for the stepwise split. Each is made on ``steps`` steps and measured
    on the following ``steps``.
    """
    for (ranks, slots), tokens, popularity in product(RANKS, TOKENS, (DRAWN, SKEWED)):
        draw = _drawn_heat if popularity == DRAWN else _skewed_heat
        heat_TLE = draw(tokens, 2 * steps)
        above = []
        for layer, target_split in enumerate(_TARGET_SPLITS):
            seen_TLE = heat_TLE[:steps, layer : layer + 1].astype(np.int32)
            placed_RS = solve(seen_TLE, ranks, slots, split=target_split).phy2log[0]
            above += tokens_above(StepwiseSplit(placed_RS, _EXPERTS), placed_RS, heat_TLE[steps:, layer])
        yield Exactness(ranks, slots, tokens, popularity, above)


def _drawn_heat(tokens: int, steps: int) -> Int64:
    """Generate heat of the static kind, ``[steps, 2, E]``."""
    return generate("static", 2, _EXPERTS, steps, tokens=tokens, choices=_CHOICES).astype(np.int64)


def _skewed_heat(tokens: int, steps: int) -> Int64:
    """Generate skewed heat, ``[steps, 2, E]``.

    Log-popularity has a standard deviation of 2 and a jitter of 0.7 per step. No expert's share exceeds 1 / choices,
    because a token chooses an expert at most once.
    """
    generator = np.random.default_rng(tokens)
    log_TLE = generator.normal(0, 2, (1, 2, _EXPERTS)) + generator.normal(0, 0.7, (steps, 2, _EXPERTS))
    share_TLE = np.exp(log_TLE)
    share_TLE /= share_TLE.sum(axis=2, keepdims=True)
    for _ in range(8):
        share_TLE = np.minimum(share_TLE, 1.0 / _CHOICES)
        share_TLE /= share_TLE.sum(axis=2, keepdims=True)
    return generator.multinomial(tokens * _CHOICES, share_TLE)


def routed_sources(
    path: Path, ranks: int, batch: int = DEFAULT_BATCH, order_seed: int | None = None
) -> np.ndarray:
    """Return the source heat of recorded routes, int16 ``[T, R, L, E]``.

    The batch has ``batch`` positions, and position ``p`` is always on rank ``p % ranks``. When a request ends, the next
    one in the file takes its position. Steps at the end with fewer than ``batch`` requests are dropped.

    Parameters
    ----------
    path
        An ``.npz`` file with ``routes`` ``[tokens, L, choices]`` and ``req_ptr``, the request boundaries.
    ranks
        Number of source ranks.
    batch
        Number of requests decoded at a time.
    order_seed
        Seed for a random order of the requests; ``None`` for file order.
    """
    with np.load(path) as file:
        routes_KLC = file["routes"]
        bounds = file["req_ptr"].astype(np.int64)
    if order_seed is not None:
        order = np.random.default_rng(order_seed).permutation(bounds.size - 1)
        routes_KLC = routes_KLC[np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in order])]
        bounds = np.concatenate([[0], np.diff(bounds)[order].cumsum()])
    step_K, place_K = steps_and_places(bounds, batch)
    steps = int(np.count_nonzero(np.bincount(step_K) == batch))
    kept_K = np.flatnonzero(step_K < steps)
    layers = routes_KLC.shape[1]
    experts = int(routes_KLC.max()) + 1
    source_TRLE = np.empty((steps, ranks, layers, experts), dtype=np.int16)
    row_K1 = (step_K[kept_K] * ranks + place_K[kept_K] % ranks)[:, None]
    for layer in range(layers):
        cells = row_K1 * experts + routes_KLC[kept_K, layer]
        counts = np.bincount(cells.ravel(), minlength=steps * ranks * experts)
        source_TRLE[:, :, layer] = counts.reshape(steps, ranks, experts)
    return source_TRLE
