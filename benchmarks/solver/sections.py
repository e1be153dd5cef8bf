"""The measurements by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.solver.ablation import ablation
from benchmarks.solver.cells import cells
from benchmarks.solver.cpu_time import cpu_times
from benchmarks.solver.extent import Extent
from benchmarks.solver.few_slots import few_slots
from benchmarks.solver.first_plan import first_plans
from benchmarks.solver.generated import generated_courses
from benchmarks.solver.heat_kinds import KINDS
from benchmarks.solver.keeping import keeping
from benchmarks.solver.known_example import known_example
from benchmarks.solver.pareto import priced
from benchmarks.solver.scaling import scaling
from benchmarks.solver.source_tables import source_tables
from eplb_service.bench.closed_loop import Course, entrants, loops
from eplb_service.bench.contest import Contest

Rows = Iterator[dict[str, Any]]

GROUPS = ("cells", "time", "loop", "scaling", "ablation", "example")
"""What ``--only`` chooses among."""


@dataclass(frozen=True)
class Section:
    """One measurement: its rows go into the results under ``name``."""

    group: str
    name: str
    title: str
    rows: Callable[[], Rows]


def sections(contest: Contest, extent: Extent, traces: Sequence[Course]) -> list[Section]:
    """All measurements; ``traces`` are recorded heat to serve beside the generated."""
    seed = extent.seeds[0]

    def loop(kinds: Sequence[str]) -> list[Course]:
        return generated_courses(kinds, extent.loop_shape, extent.loop_windows, seed)

    return [
        Section("cells", "cells", "balance", lambda: cells(contest, extent.shapes, extent.seeds)),
        Section(
            "cells",
            "tables",
            "tables",
            lambda: source_tables(contest, extent.table_shape, seed, extent.spreads),
        ),
        Section("time", "time", "CPU time", lambda: cpu_times(contest, extent.timed, extent.repeats, seed)),
        Section("time", "keeping", "keeping everything", lambda: keeping(contest, extent.repeats, seed)),
        Section("time", "first_plan", "first plans", lambda: first_plans(contest, extent.processes, seed)),
        Section("loop", "loop", "closed loop", lambda: loops(contest, loop(KINDS), entrants(contest))),
        Section(
            "loop",
            "pareto",
            "balance against moves",
            lambda: loops(contest, loop(("drift", "bursty")), priced(contest)),
        ),
        Section("loop", "traces", "recorded traces", lambda: loops(contest, traces, entrants(contest))),
        Section(
            "scaling",
            "scaling",
            "scaling",
            lambda: scaling(contest, min(extent.repeats, 2), seed, extent.growing),
        ),
        Section(
            "ablation",
            "ablation",
            "ablation",
            lambda: ablation(contest, extent.loop_shape, extent.ablation_windows, extent.seeds, traces),
        ),
        Section("example", "example", "known example", lambda: known_example(contest)),
        Section(
            "example",
            "few_slots",
            "few slots, long search",
            lambda: few_slots(contest, extent.long_seconds, seed),
        ),
    ]
