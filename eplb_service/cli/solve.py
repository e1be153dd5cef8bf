"""``eplb solve``: from recorded heat to a placement file, and what the placement is worth."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from eplb_service.atomic_write import check_output
from eplb_service.cli.json_out import print_json
from eplb_service.cli.planner_options import (
    NodesOption,
    TokenGroupOption,
    takes_planner_settings,
    topology_of,
)
from eplb_service.cli.trace_options import (
    AsOption,
    BatchOption,
    ExpertsOption,
    HeatOption,
    MapOption,
    reading,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.placement_file import (
    FORMATS,
    SUFFIXES,
    placement_format,
    read_placement,
    write_placement,
)
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.placement import Placement, check_shape
from eplb_service.planner.options import planner_settings
from eplb_service.planner.scoring import par, split_loads

if TYPE_CHECKING:
    from eplb_service.offline import Solution

_WORST_LAYERS = 5


@takes_planner_settings()
def solve(
    heat: HeatOption,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the expert-parallel group.")],
    slots: Annotated[
        int, typer.Option(min=1, help="Expert slots per rank and layer, redundant ones included.")
    ],
    out: Annotated[Path, typer.Option(help="File to write: .npz (with tables), .json or .yaml.")],
    format: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(FORMATS)}; by default what the name of --out says, .json vllm-ascend."
        ),
    ] = None,
    first_layer: Annotated[
        int,
        typer.Option(min=0, help="The model's number of its first MoE layer (tensorrt-llm counts by it)."),
    ] = 0,
    placement: Annotated[
        Path | None,
        typer.Option(help="Placement that serves now (.npz, .json, .yaml, .pt); in order where not given."),
    ] = None,
    nodes: NodesOption = None,
    token_group: TokenGroupOption = 1,
    read_as: AsOption = None,
    map: MapOption = None,
    experts: ExpertsOption = None,
    batch: BatchOption = DEFAULT_BATCH,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    **planner: Any,
) -> None:
    """Compute a placement and its tables from recorded heat, and show what they gain."""
    check_output(out, SUFFIXES)
    settings = planner_settings(planner)
    placement_format(out, format)
    trace = open_trace(heat, reading(read_as, map, experts, batch))
    steps, layers, experts = trace.shape
    with naming(heat):
        heat_TLE = trace.heat(0, steps)
        source_RLE = trace.source(0, steps) if trace.facts.ranks == ranks else None
    check_shape(experts, ranks, slots)
    topology = topology_of(ranks, nodes, token_group, trace)
    deployed = read_placement(placement, experts, ranks).phy2log_LRS if placement else None
    compile_solver()
    from eplb_service import offline

    solved_for = partial(
        offline.solve,
        heat_TLE,
        ranks,
        slots,
        placement=deployed,
        source_heat=None if source_RLE is None else source_RLE[None],
        topology=topology,
    )
    began = time.perf_counter()
    solution = solved_for(**asdict(settings))
    milliseconds = (time.perf_counter() - began) * 1e3
    solved = Placement(solution.phy2log, experts)
    write_placement(out, solved, solution.log2phy, format, first_layer)
    fixed = split_loads(heat_TLE, solved, solved.default_log2phy(), source_RLE, settings.split)
    par_fixed_tables = float(par(fixed).mean())
    even = None
    if settings.split == "tables":
        even = solved_for(**asdict(replace(settings, split="even", budget_ms=None)))
    if json:
        print_json(_document(solution, even, settings.policy, steps, milliseconds, par_fixed_tables))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{settings.policy}: {layers} layers x {experts} experts on {ranks} ranks x {slots} slots")
    console.print(_table(solution))
    console.print(
        f"PAR: hottest rank over mean rank in each of {steps} steps, mean over steps; hottest rank: its tokens a step."
    )
    if even is not None:
        console.print(
            "For a host that itself spreads an expert's tokens evenly over its copies (vLLM), --split even reaches "
            f"PAR {even.par_after:.3f}, hottest rank {even.hottest_after_L.mean():,.2f}."
        )
    if out.suffix != ".npz":
        console.print(
            f"{out.suffix[1:].upper()} holds no tables; with its host's own, PAR is {par_fixed_tables:.3f}."
        )
    console.print(f"Solved in {milliseconds:.0f} ms; written to {out}.")


def _table(solution: Solution) -> Table:
    """All layers together, then those that stand worst afterwards."""
    table = Table()
    table.add_column("layer")
    for heading in ("PAR before", "PAR after", "hottest rank before", "after", "moves"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"all {solution.par_after_L.size}",
        f"{solution.par_before:.3f}",
        f"{solution.par_after:.3f}",
        f"{solution.hottest_before_L.mean():,.2f}",
        f"{solution.hottest_after_L.mean():,.2f}",
        str(solution.moves),
        style="bold",
        end_section=True,
    )
    for layer in np.argsort(-solution.par_after_L)[:_WORST_LAYERS]:
        table.add_row(
            str(layer),
            f"{solution.par_before_L[layer]:.3f}",
            f"{solution.par_after_L[layer]:.3f}",
            f"{solution.hottest_before_L[layer]:,.2f}",
            f"{solution.hottest_after_L[layer]:,.2f}",
            str(solution.moves_L[layer]),
        )
    return table


def _document(
    solution: Solution,
    even: Solution | None,
    policy: str,
    steps: int,
    milliseconds: float,
    par_fixed_tables: float,
) -> dict[str, Any]:
    layers, ranks, slots = solution.phy2log.shape
    return {
        "policy": policy,
        "steps": steps,
        "layers": layers,
        "experts": solution.log2phy.shape[2],
        "ranks": ranks,
        "slots": slots,
        "par_before": solution.par_before,
        "par_after": solution.par_after,
        "par_after_fixed_tables": par_fixed_tables,
        "par_after_split_even": None if even is None else even.par_after,
        "moves": solution.moves,
        "solve_ms": milliseconds,
        "par_before_per_layer": solution.par_before_L,
        "par_after_per_layer": solution.par_after_L,
        "hottest_before_per_layer": solution.hottest_before_L,
        "hottest_after_per_layer": solution.hottest_after_L,
        "hottest_after_split_even_per_layer": None if even is None else even.hottest_after_L,
        "moves_per_layer": solution.moves_L,
        "verdicts": [verdict.reason for verdict in solution.verdicts],
    }
