"""``eplb solve``: compute a placement from recorded heat, write it to a file, and show its gain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, check_shape, mean_par
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.price import SplitCost
from eplb_core.planner.score import par_of_steps, split_steps
from eplb_core.planner.settings import EVEN, STEP, TABLES, PlannerSettings, planner_settings
from eplb_service.cli.file_options import (
    DRAFT_LAYERS,
    FIRST_LAYER,
    FORMAT,
    HEAT,
    PLACEMENT,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    check_placement_output,
    read_start_placement,
)
from eplb_service.cli.options import JSON, RESULTS, option, takes_options
from eplb_service.cli.output import layers_table, output_console, print_json
from eplb_service.cli.planner_options import POLICY, as_recorded, check_groups, one_policy, planner_flags
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import naming
from eplb_service.io.placement_file import write_placement

if TYPE_CHECKING:
    from rich.console import Console

    from eplb_core.placement import Int32
    from eplb_core.planner.topology import Topology
    from eplb_service.offline import Solution


@takes_options(*planner_flags("policy"))
def solve(
    group: RankOptions,
    layout: SlotOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    placement: Path | None = PLACEMENT,
    policy: str = POLICY,
    out: Path | None = option(
        None, "File to write: .npz (with tables), .json, .yaml or .jsonl; none by default.", section=RESULTS
    ),
    format: str | None = FORMAT,
    first_layer: int | None = FIRST_LAYER,
    draft_layers: int | None = DRAFT_LAYERS,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Compute a placement and its tables from recorded heat, and show their gain."""
    check_placement_output(out, format, first_layer, draft_layers)
    one_policy(policy)
    trace = reading.open(heat)
    settings = as_recorded(planner_settings(planner), trace, planner)
    slots = layout.count(trace.experts, group.ranks)
    check_shape(trace.experts, group.ranks, slots)
    with naming(heat):
        heat_TLE = trace.heat(0, trace.steps)
        source_RLE = trace.source(0, trace.steps) if trace.facts.ranks == group.ranks else None
    start_LRS = read_start_placement(placement, trace, group.ranks)
    topology = group.topology(trace)
    check_groups(settings, trace.experts, [slots], topology)
    problem = _Problem(Window(heat_TLE, source_RLE), slots, topology, start_LRS, policy)
    compile_solver()
    start = time.perf_counter()
    solution = problem.solve(settings)
    solve_ms = (time.perf_counter() - start) * 1e3
    if out is not None:
        numbers = trace.facts.layer_numbers
        if first_layer is not None:
            numbers = tuple(range(first_layer, first_layer + trace.layers))
        write_placement(
            out,
            Placement(solution.phy2log, trace.experts),
            solution.log2phy,
            format,
            numbers,
            draft_layers or 0,
        )
    report = _report(problem, settings, solution, solve_ms)
    if json:
        print_json(report)
    else:
        _print(report, out)


@dataclass(frozen=True)
class _Problem:
    """Problem to solve with different settings: the heat and the deployment."""

    window: Window
    slots: int
    topology: Topology
    start_LRS: Int32 | None
    policy: str

    def solve(self, settings: PlannerSettings) -> Solution:
        """Solve with these settings."""
        from eplb_service import offline

        return offline.solve_window(
            self.window, self.slots, self.topology, settings, self.start_LRS, policy=self.policy
        )


def _report(
    problem: _Problem, settings: PlannerSettings, solution: Solution, solve_ms: float
) -> dict[str, Any]:
    """Return the figures for the solution, and for hosts that split tokens differently, keyed by JSON key.

    A figure that does not apply is ``None``. PARs are means over layers and steps. ``ms_after`` is the time per step of
    each layer's slowest rank, summed over the layers.
    """
    window = problem.window
    layers, ranks, slots = solution.phy2log.shape
    placement = Placement(solution.phy2log, window.experts)
    fixed_RLE = default_tables(placement, settings.split, settings.deal_width)
    fixed = split_steps(window.heat_TLE, placement, fixed_RLE, window.source_RLE, settings.split)
    # Assume that the hold-out's correction for overfitting (the optimism) also applies to fixed tables.
    optimism_L = np.array([verdict.optimism or 0.0 for verdict in solution.verdicts])
    even = None
    if settings.split == TABLES:
        even = problem.solve(replace(settings, split=EVEN, budget_ms=None))
    by_tables = None
    split = None
    if settings.split == STEP and settings.cost_curve is not None:
        by_tables = problem.solve(replace(settings, split=TABLES, budget_ms=None))
        split = SplitCost.of(settings, ranks, window.experts, float(window.heat_TLE.sum(axis=2).mean()))
    figures = {name: value for name, value in vars(solution).items() if name not in ("phy2log", "log2phy")}
    return {
        "policy": problem.policy,
        "steps": len(window.heat_TLE),
        "layers": layers,
        "experts": window.experts,
        "ranks": ranks,
        "slots": slots,
        "par_before": solution.par_before,
        "par_after": solution.par_after,
        "par_after_fixed_tables": float(mean_par(par_of_steps(fixed) + optimism_L)),
        "par_after_split_even": even and even.par_after,
        "hottest_after_split_even_L": even and even.hottest_after_L,
        "ms_by_tables": by_tables and by_tables.ms_after,
        "split_ms": split and split.ms_of_step(layers),
        "split": split,
        "moves": solution.moves,
        "solve_ms": solve_ms,
        **figures,
        "verdicts": [verdict.reason for verdict in solution.verdicts],
    }


def _print(report: Mapping[str, Any], out: Path | None) -> None:
    console = output_console()
    console.print(
        f"{report['policy']}: {report['layers']} layers x {report['experts']} experts on {report['ranks']} ranks x "
        f"{report['slots']} slots"
    )
    names = {
        "PAR before": ("par_before_L", ".3f"),
        "after": ("par_after_L", ".3f"),
        "hottest rank before": ("hottest_before_L", ",.2f"),
        "hottest after": ("hottest_after_L", ",.2f"),
        "moves": ("moves_L", ",.1f"),
    }
    columns = {heading: (report[name], spec) for heading, (name, spec) in names.items()}
    console.print(layers_table(columns, report["par_after_L"]), soft_wrap=False)
    console.print(
        f"PAR: load of the hottest rank over the mean rank load in each of {report['steps']} steps; hottest rank: "
        "its tokens per step."
    )
    _print_alternatives(console, report)
    if out is not None and out.suffix != ".npz":
        console.print(
            f"A {out.suffix} file contains no tables; with the host's own tables, PAR is "
            f"{report['par_after_fixed_tables']:.3f}."
        )
    written = "nothing was written (no --out)" if out is None else f"written to {out}"
    console.print(f"Solved in {report['solve_ms']:.0f} ms, {report['moves']:,} moves; {written}.")


def _print_alternatives(console: Console, report: Mapping[str, Any]) -> None:
    """Print the times according to the cost curve, and the results with other splits of tokens over replicas."""
    if report["ms_before"] is not None:
        console.print(
            f"According to the cost curve, the slowest ranks of all layers take {report['ms_after']:.3f} ms per step; "
            f"before, they took {report['ms_before']:.3f} ms."
        )
    if report["split"] is not None:
        net_ms = report["ms_after"] + report["split_ms"]
        console.print(
            f"The stepwise split itself takes {report['split_ms']:.3f} ms of a step, so the total is {net_ms:.3f} ms. "
            f"With a placement for tables and without the stepwise split, they take {report['ms_by_tables']:.3f} ms."
        )
    if report["par_after_split_even"] is not None:
        console.print(
            "A host that splits an expert's tokens evenly over its replicas (vLLM, --split even) reaches PAR "
            f"{report['par_after_split_even']:.3f}; its hottest rank processes "
            f"{report['hottest_after_split_even_L'].mean():,.2f} tokens per step."
        )
