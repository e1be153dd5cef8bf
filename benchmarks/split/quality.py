"""Peak-to-average ratios of the window after a decision: placements of three kinds, each under five splits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from eplb_service.bench.closed_loop import Course
from eplb_service.bench.scoring import peak_to_average
from eplb_service.offline import solve
from eplb_service.solver.stepwise.split import level, loads_by_step, search_memory, sharing_of, split_evenly
from worker_agent.moe.stepwise import StepwiseSplit

FOR_EVEN, FOR_STEPS = "made for even shares", "made for the stepwise split"
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


def quality(course: Course, window: int, windows: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """A row for each placement: its name, and the mean ratio of the next windows under each split, over layers.

    Windows follow one another; a placement made on one serves the next. Peers that draw do so with ``seed``.
    """
    generator = np.random.default_rng(seed)
    heat_TLE = course.heat_TLE.astype(np.int64)
    for name, options in PLACEMENTS.items():
        ratios: dict[str, list[float]] = {split: [] for split in SPLITS}
        for start in starts_of(len(heat_TLE), window, windows):
            seen_TLE, next_TLE = (
                heat_TLE[start : start + window],
                heat_TLE[start + window : start + 2 * window],
            )
            placed_LRS = solve(seen_TLE, course.ranks, course.slots, **options).phy2log
            for layer, placed_RS in enumerate(placed_LRS):
                for split, loads_TR in loads(placed_RS, next_TLE[:, layer], generator).items():
                    ratios[split].append(peak_to_average(loads_TR))
        yield {"placement": name, **{split: float(np.mean(found)) for split, found in ratios.items()}}


def starts_of(steps: int, window: int, windows: int) -> list[int]:
    """The first steps of so many windows, spread over all ``steps``, each with another one behind it."""
    return [int(at) for at in np.linspace(0, steps - 2 * window, windows)]


def loads(
    placed_RS: np.ndarray, heat_TE: np.ndarray, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """Tokens of each rank in each step, ``[T, R]``, under each of ``SPLITS``."""
    ranks, slots = placed_RS.shape
    placed_RS = np.ascontiguousarray(placed_RS, dtype=np.int32)
    experts = heat_TE.shape[1]
    sharing, memory = sharing_of(placed_RS, experts), search_memory(ranks, experts)
    split = StepwiseSplit(placed_RS, experts)
    found: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS[:-1]}
    for heat_E in heat_TE:
        even_P, best_P, load_R = np.empty(ranks * slots), np.empty(ranks * slots), np.empty(ranks)
        split_evenly(sharing, heat_E.astype(np.float64), even_P, load_R, False)
        found[EVEN_SHARES].append(load_R.copy())
        found[RANDOM].append(_drawn(sharing, heat_E, even_P, ranks, generator))
        split_evenly(sharing, heat_E.astype(np.float64), best_P, load_R, False)
        level(sharing, best_P, load_R, memory, False)
        found[LPLB].append(_drawn(sharing, heat_E, best_P, ranks, generator))
        found[STEPWISE].append(stepwise_loads(split, heat_E, ranks, slots))
    stacked = {name: np.stack(rows) for name, rows in found.items()}
    stacked[OPTIMUM] = loads_by_step(heat_TE[:, None], placed_RS[None], True)[:, 0]
    return stacked


def stepwise_loads(split: StepwiseSplit, heat_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """What the live layer's split gives each rank."""
    choices = int(heat_E.sum())
    ends_P = split.ends(torch.from_numpy(np.ascontiguousarray(heat_E)), choices).numpy()
    rank_P = split.physical_P1[:-1].numpy() // slots
    return np.bincount(rank_P, np.diff(ends_P, prepend=0), minlength=ranks)


def _drawn(
    sharing: object, heat_E: np.ndarray, flow_P: np.ndarray, ranks: int, generator: np.random.Generator
) -> np.ndarray:
    """Each token to a replica of its expert at random, replicas as likely as their part of the expert's tokens."""
    load_R = np.zeros(ranks)
    for e, tokens in enumerate(heat_E):
        slot_K = sharing.slot_P[sharing.first_E1[e] : sharing.first_E1[e + 1]]  # type: ignore[attr-defined]
        if tokens:
            share_K = np.maximum(flow_P[slot_K], 0.0)
            drawn_K = generator.multinomial(tokens, share_K / share_K.sum())
            np.add.at(load_R, sharing.rank_P[slot_K], drawn_K)  # type: ignore[attr-defined]
    return load_R
