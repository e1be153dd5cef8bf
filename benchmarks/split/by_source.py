"""Peak-to-average ratios of the window after a decision under tables: each source rank sends by its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.split.quality import starts_of
from eplb_service.bench.closed_loop import Course
from eplb_service.bench.scoring import peak_to_average
from eplb_service.offline import Solution, solve
from eplb_service.placement import Placement, even_log2phy, with_entries

TABLES = ("by rank % replicas", "solved", "dealt round the replicas", "dealt, solved")


def by_source(course: Course, window: int, windows: int, width: int, seed: int = 0) -> dict[str, list[float]]:
    """The mean ratio of each window served, over layers, under each of ``TABLES``.

    Tokens come from the ranks as ``mix_RLE`` of the course says, evenly without it, drawn with ``seed``; tables
    are made on one window's and serve the next. Those that deal have ``width`` entries.
    """
    generator = np.random.default_rng(seed)
    heat_TLE = course.heat_TLE.astype(np.int64)
    found: dict[str, list[float]] = {name: [] for name in TABLES}
    for start in starts_of(course, window, windows):
        source_TRLE = drawn_sources(heat_TLE[start : start + 2 * window], course, generator)
        seen_TRLE, next_TRLE = source_TRLE[:window], source_TRLE[window:]
        for name, (phy2log_LRS, table_RLED) in tables_made(seen_TRLE, course, width):
            ratios = [
                peak_to_average(loads_by_table(phy2log_RS, table_RLED[:, layer], next_TRLE[:, :, layer]))
                for layer, phy2log_RS in enumerate(phy2log_LRS)
            ]
            found[name].append(float(np.mean(ratios)))
    return found


def tables_made(
    seen_TRLE: np.ndarray, course: Course, width: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """A placement ``[L, R, S]`` and its tables ``[R, L, E, D]`` for each of ``TABLES``, made on a window."""

    def solved(split: str) -> Solution:
        return solve(
            seen_TRLE.sum(axis=1),
            course.ranks,
            course.slots,
            source_heat=seen_TRLE,
            split=split,
            deal_width=width,
        )

    experts = seen_TRLE.shape[3]
    for split, rule, entries in (("tables", TABLES[0], 1), ("deal", TABLES[2], width)):
        solution = solved(split)
        by_rule = even_log2phy(Placement(solution.phy2log, experts), entries)
        yield rule, (solution.phy2log, with_entries(by_rule, 3))
        yield TABLES[TABLES.index(rule) + 1], (solution.phy2log, with_entries(solution.log2phy, 3))


def drawn_sources(heat_TLE: np.ndarray, course: Course, generator: np.random.Generator) -> np.ndarray:
    """Each step's tokens by the rank that they come from, int64 ``[T, R, L, E]``."""
    ranks = course.ranks
    mix_LER = np.full((*heat_TLE.shape[1:], ranks), 1 / ranks)
    if course.mix_RLE is not None:
        mix_LER = np.moveaxis(course.mix_RLE, 0, -1) / course.mix_RLE.sum(axis=0)[..., None]
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
