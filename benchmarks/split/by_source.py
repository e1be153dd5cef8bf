"""Peak-to-average ratios of the window after a decision under tables: each source rank sends by its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.split.quality import starts_of
from eplb_service.bench.closed_loop import Course
from eplb_service.bench.scoring import peak_to_average
from eplb_service.offline import Solution, solve
from eplb_service.placement import Placement, even_log2phy, with_entries

GREEDY, RULE, SOLVED, ROUND, DEALT = TABLES = (
    "DeepSeek's EPLB, by rank % replicas",
    "by rank % replicas",
    "solved",
    "dealt round the replicas",
    "dealt, solved",
)


def by_source(
    source_TRLE: np.ndarray, slots: int, window: int, windows: int, width: int
) -> dict[str, list[float]]:
    """The mean ratio of each window served, over layers, under each of ``TABLES``.

    ``source_TRLE`` are the tokens of each step by the rank that they come from. Tables are made on one window's and
    serve the next. Those that deal have ``width`` entries.
    """
    found: dict[str, list[float]] = {name: [] for name in TABLES}
    for start in starts_of(len(source_TRLE), window, windows):
        seen_TRLE = source_TRLE[start : start + window].astype(np.int64)
        next_TRLE = source_TRLE[start + window : start + 2 * window].astype(np.int64)
        for name, (phy2log_LRS, table_RLED) in tables_made(seen_TRLE, slots, width):
            ratios = [
                peak_to_average(loads_by_table(phy2log_RS, table_RLED[:, layer], next_TRLE[:, :, layer]))
                for layer, phy2log_RS in enumerate(phy2log_LRS)
            ]
            found[name].append(float(np.mean(ratios)))
    return found


def tables_made(
    seen_TRLE: np.ndarray, slots: int, width: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """A placement ``[L, R, S]`` and its tables ``[R, L, E, D]`` for each of ``TABLES``, made on a window."""
    ranks, experts = seen_TRLE.shape[1], seen_TRLE.shape[3]

    def solved(**options: str) -> Solution:
        heat_TLE = seen_TRLE.sum(axis=1)
        return solve(heat_TLE, ranks, slots, source_heat=seen_TRLE, deal_width=width, **options)

    def by_rule(solution: Solution, entries: int) -> tuple[np.ndarray, np.ndarray]:
        table_RLE = even_log2phy(Placement(solution.phy2log, experts), entries)
        return solution.phy2log, with_entries(table_RLE, 3)

    yield GREEDY, by_rule(solved(policy="deepseek", split="tables"), 1)
    for split, rule, own, entries in (("tables", RULE, SOLVED, 1), ("deal", ROUND, DEALT, width)):
        solution = solved(split=split)
        yield rule, by_rule(solution, entries)
        yield own, (solution.phy2log, with_entries(solution.log2phy, 3))


def drawn_sources(course: Course, seed: int = 0) -> np.ndarray:
    """Each step's tokens by the rank that they come from, int64 ``[T, R, L, E]``: each token from any rank alike."""
    generator = np.random.default_rng(seed)
    heat_TLE, ranks = course.heat_TLE.astype(np.int64), course.ranks
    mix_LER = np.full((*heat_TLE.shape[1:], ranks), 1 / ranks)
    drawn_TLER = generator.multinomial(heat_TLE, np.broadcast_to(mix_LER, (len(heat_TLE), *mix_LER.shape)))
    return np.moveaxis(drawn_TLER, -1, 1)


def loads_by_table(phy2log_RS: np.ndarray, table_RED: np.ndarray, source_TRE: np.ndarray) -> np.ndarray:
    """Tokens of each rank in each step, ``[T, R]``: a source's ``i``-th token of an expert goes to entry ``i % D``."""
    ranks, slots = phy2log_RS.shape
    width = table_RED.shape[2]
    # Of c tokens, entry k gets those numbered k, k + D, and so on.
    tokens_TRED = (source_TRE[..., None] + width - 1 - np.arange(width)) // width
    at_RED = table_RED // slots
    return np.stack(
        [np.bincount(at_RED.ravel(), tokens_RED.ravel(), minlength=ranks) for tokens_RED in tokens_TRED]
    )
