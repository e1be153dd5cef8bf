"""``eplb solve``: from recorded heat to a placement file, and what the placement is worth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from eplb_service.cli.options import JSON, RESULTS, option, takes_options
from eplb_service.cli.output import compact_table, output_console, print_json
from eplb_service.cli.trace_options import (
    FIRST_LAYER,
    FORMAT,
    HEAT,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    StartOptions,
    check_placement_output,
    planner_flags,
)
from eplb_service.cli.warmup import compile_progress
from eplb_service.io.open_trace import naming
from eplb_service.io.placement_file import write_placement
from eplb_service.placement import Placement, check_shape, mean_par
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.price import SplitCost
from eplb_service.planner.score import par_of_steps, replicas_woken, split_steps
from eplb_service.planner.settings import EVEN, STEP, TABLES, PlannerSettings, planner_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from eplb_service.heat.window import Counts
    from eplb_service.offline import Solution
    from eplb_service.placement import Float64

    Solver = Callable[..., Solution]

_WORST_LAYERS = 5


@takes_options(*planner_flags())
def solve(
    group: RankOptions,
    layout: SlotOptions,
    start: StartOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    out: Path | None = option(
        None, "File to write: .npz (with tables), .json, .yaml or .jsonl; none by default.", section=RESULTS
    ),
    format: str | None = FORMAT,
    first_layer: int | None = FIRST_LAYER,
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Compute a placement and its tables from recorded heat, and show what they gain."""
    check_placement_output(out, format, first_layer)
    settings = planner_settings(planner)
    trace = reading.open(heat)
    slots = layout.count(trace.experts, group.ranks)
    check_shape(trace.experts, group.ranks, slots)
    with naming(heat):
        heat_TLE = trace.heat(0, trace.steps)
        source_RLE = trace.source(0, trace.steps) if trace.facts.ranks == group.ranks else None
    start_LRS = start.placed(trace, group.ranks, [slots])
    prior_TLE = start.prior_heat(trace, reading)
    topology = group.topology(trace)

    def solved(by: PlannerSettings, layers: slice = slice(None)) -> Solution:
        from eplb_service import offline

        return offline.solve(
            heat_TLE[:, layers],
            group.ranks,
            slots,
            placement=None if start_LRS is None else start_LRS[layers],
            prior=None if prior_TLE is None else prior_TLE[:, layers],
            source_heat=None if source_RLE is None else source_RLE[None, :, layers],
            topology=topology,
            **vars(by),
        )

    with compile_progress():
        # One layer first, so that the time shown is not the compiler's.
        solved(replace(settings, budget_ms=None), slice(1))
        began = time.perf_counter()
        solution = solved(settings)
        milliseconds = (time.perf_counter() - began) * 1e3
        if out is not None:
            numbers: Sequence[int] = trace.facts.layer_numbers
            if first_layer is not None:
                numbers = range(first_layer, first_layer + trace.layers)
            placed = Placement(solution.phy2log, trace.experts)
            write_placement(out, placed, solution.log2phy, format, numbers)
        report = _report(heat_TLE, source_RLE, settings, solution, solved, milliseconds)
    if json:
        print_json(report)
    else:
        _print(report, out)


def _report(
    heat_TLE: Counts,
    source_RLE: Float64 | None,
    settings: PlannerSettings,
    solution: Solution,
    solved: Solver,
    milliseconds: float,
) -> dict[str, Any]:
    """The solution beside those for other hosts, as JSON has it; ``None`` are those that do not apply.

    PARs are means over layers and steps, ``moe_ms`` the slowest ranks of all layers in a step.
    """
    layers, ranks, slots = solution.phy2log.shape
    steps, _, experts = heat_TLE.shape
    placed = Placement(solution.phy2log, experts)
    own_RLE = first_tables(placed, settings.split, settings.deal_width)
    fixed = split_steps(heat_TLE, placed, own_RLE, source_RLE, settings.split)
    even = by_tables = split = None
    if settings.split == TABLES:
        even = solved(replace(settings, split=EVEN, budget_ms=None))
    if settings.split == STEP and settings.cost_curve is not None:
        by_tables = solved(replace(settings, split=TABLES, budget_ms=None))
        split = SplitCost.of(settings, ranks, experts, float(heat_TLE.sum(axis=2).mean()))
    return {
        "policy": settings.policy,
        "steps": steps,
        "layers": layers,
        "experts": experts,
        "ranks": ranks,
        "slots": slots,
        "par_before": solution.par_before,
        "par_after": solution.par_after,
        "par_after_fixed_tables": float(mean_par(par_of_steps(fixed))),
        "par_after_split_even": even and even.par_after,
        "moe_ms_before": solution.ms_before,
        "moe_ms_after": solution.ms_after,
        "moe_ms_by_tables": by_tables and by_tables.ms_after,
        "split_ms": split and split.ms_of_step(layers),
        "split": split,
        "replicas_woken_per_rank": split and replicas_woken(heat_TLE, placed),
        "moves": solution.moves,
        "solve_ms": milliseconds,
        "par_before_per_layer": solution.par_before_L,
        "par_after_per_layer": solution.par_after_L,
        "hottest_before_per_layer": solution.hottest_before_L,
        "hottest_after_per_layer": solution.hottest_after_L,
        "hottest_after_split_even_per_layer": even and even.hottest_after_L,
        "moves_per_layer": solution.moves_L.tolist(),
        "verdicts": [verdict.reason for verdict in solution.verdicts],
    }


def _print(report: Mapping[str, Any], out: Path | None) -> None:
    console = output_console()
    console.print(
        f"{report['policy']}: {report['layers']} layers x {report['experts']} experts on {report['ranks']} ranks x "
        f"{report['slots']} slots"
    )
    console.print(_table(report), soft_wrap=False)
    console.print(
        f"PAR: hottest rank over mean rank in each of {report['steps']} steps, mean over steps; "
        "hottest rank: its tokens per step."
    )
    if report["moe_ms_before"] is not None:
        console.print(
            f"Under the cost curve the slowest ranks of all layers take {report['moe_ms_after']:.3f} ms of a step, "
            f"before {report['moe_ms_before']:.3f} ms."
        )
    if report["split"] is not None:
        console.print(_split_verdict(report), markup=False)
    if report["hottest_after_split_even_per_layer"] is not None:
        console.print(
            "For a host that itself spreads an expert's tokens evenly over its replicas (vLLM), --split even reaches "
            f"PAR {report['par_after_split_even']:.3f}, hottest rank "
            f"{report['hottest_after_split_even_per_layer'].mean():,.2f}."
        )
    if out is not None and out.suffix != ".npz":
        console.print(
            f"{out.suffix[1:].upper()} holds no tables; with its host's own, PAR is "
            f"{report['par_after_fixed_tables']:.3f}."
        )
    written = "nothing is written without --out" if out is None else f"written to {out}"
    console.print(f"Solved in {report['solve_ms']:.0f} ms; {written}.")


def _split_verdict(report: Mapping[str, Any]) -> str:
    """Cost and worth of the stepwise split itself, beside tables without it; only where all of it is known."""
    split_ms, after_ms = report["split_ms"] or 0.0, report["moe_ms_after"] or 0.0
    by_tables_ms, net_ms = report["moe_ms_by_tables"] or 0.0, after_ms + split_ms
    won = by_tables_ms - net_ms
    verdict = f"pays, by {won:.3f} ms" if won > 0 else f"does not pay: it loses {-won:.3f} ms"
    return (
        f"The split itself takes {split_ms:.3f} ms of a step more, {net_ms:.3f} ms in all: {report['split']}. "
        f"It wakes {report['replicas_woken_per_rank']:.2f} replicas per rank and layer. Placed for tables, without it, "
        f"{by_tables_ms:.3f} ms: on these steps the stepwise split {verdict}."
    )


def _table(report: Mapping[str, Any]) -> Table:
    """All layers together, then those that are worst afterwards."""
    table = compact_table("layer", "PAR before", "after", "hottest rank before", "after", "moves")
    columns_L = (
        report["par_before_per_layer"],
        report["par_after_per_layer"],
        report["hottest_before_per_layer"],
        report["hottest_after_per_layer"],
    )
    means = (report["par_before"], report["par_after"], *(column_L.mean() for column_L in columns_L[2:]))

    def cells(values: Sequence[float]) -> list[str]:
        return [f"{value:.3f}" for value in values[:2]] + [f"{value:,.2f}" for value in values[2:]]

    table.add_row(
        f"all {report['layers']}", *cells(means), str(report["moves"]), style="bold", end_section=True
    )
    for layer in np.argsort(-report["par_after_per_layer"])[:_WORST_LAYERS]:
        values = [column_L[layer] for column_L in columns_L]
        table.add_row(str(layer), *cells(values), str(report["moves_per_layer"][layer]))
    return table
