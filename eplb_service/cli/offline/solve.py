"""``eplb solve``: from recorded heat to a placement file, and what the placement is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import typer
from rich.table import Table

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.cli.offline.split_worth import SplitWorth
from eplb_service.cli.offline.warmup import compile_progress, compile_search
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import FirstLayerOption, FormatOption, RankOptions, SlotOptions
from eplb_service.cli.options.planner import takes_planner_settings
from eplb_service.cli.options.trace import HeatOption, ReadingOptions, check_tokens
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json
from eplb_service.cli.output.tables import compact_table
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.placement_file import SUFFIXES, placement_format, write_placement
from eplb_service.placement import Placement, check_shape, mean_par
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.options import planner_settings
from eplb_service.planner.scoring import split_steps
from eplb_service.planner.settings import EVEN, STEP, TABLES

if TYPE_CHECKING:
    from eplb_service.heat.window import Counts
    from eplb_service.io.trace import Trace
    from eplb_service.offline import Solution
    from eplb_service.placement import Float64, Int32
    from eplb_service.planner.settings import PlannerSettings
    from eplb_service.planner.topology import Topology

_WORST_LAYERS = 5


@dataclass(frozen=True)
class OutputOptions:
    """Where the placement goes."""

    SECTION: ClassVar = "Results"

    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write: .npz (with tables), .json, .yaml or .jsonl; without it nothing is written."
        ),
    ] = None
    format: FormatOption = None
    first_layer: FirstLayerOption = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False

    def check(self) -> None:
        """Raise ``UserError``, ``OutputError`` or ``PlacementError`` where it could not be written; at once."""
        if self.out is None:
            if self.format is not None or self.first_layer is not None:
                raise UserError("--format and --first-layer say how a file is written; give it with --out")
            return
        check_output(self.out, SUFFIXES)
        placement_format(self.out, self.format)

    def write(self, solution: Solution, trace: Trace) -> None:
        """Write the placement and its tables, where a file is asked for."""
        if self.out is not None:
            solved = Placement(solution.phy2log, trace.experts)
            write_placement(self.out, solved, solution.log2phy, self.format, self.layer_numbers(trace))

    def layer_numbers(self, trace: Trace) -> Sequence[int]:
        """The model's own numbers of the layers: those from ``--first-layer`` on, or as recorded."""
        if self.first_layer is None:
            return trace.facts.layer_numbers
        return range(self.first_layer, self.first_layer + trace.layers)


@takes_planner_settings()
@option_groups
def solve(
    heat: HeatOption,
    group: RankOptions,
    slot_options: SlotOptions,
    output: OutputOptions,
    reading: ReadingOptions,
    **planner: Any,
) -> None:
    """Compute a placement and its tables from recorded heat, and show what they gain."""
    output.check()
    settings = planner_settings(planner)
    trace = open_trace(heat, reading.reading())
    slots = slot_options.count(trace.experts, group.ranks)
    check_shape(trace.experts, group.ranks, slots)
    with naming(heat):
        heat_TLE = trace.heat(0, trace.steps)
        source_RLE = trace.source(0, trace.steps) if trace.facts.ranks == group.ranks else None
        check_tokens(heat, trace)
    asked = _Problem(
        heat_TLE,
        group.ranks,
        slots,
        source_RLE,
        topology=group.topology(trace),
        deployed_LRS=slot_options.start(trace, group.ranks),
        prior_TLE=slot_options.prior_heat(trace, reading.reading()),
    )
    with compile_progress():
        compile_search(heat_TLE, Placement.linear(trace.layers, trace.experts, group.ranks, slots), settings)
        # One layer first, so that the time shown is not the compiler's.
        asked.solved(replace(settings, budget_ms=None), slice(1))
        began = time.perf_counter()
        solution = asked.solved(settings)
        milliseconds = (time.perf_counter() - began) * 1e3
        output.write(solution, trace)
        found = _found(asked, settings, solution, milliseconds)
    if output.json:
        print_json(_document(found))
    else:
        _print(found, output.out)


@dataclass(frozen=True)
class _Problem:
    """What is solved, by as many settings as are compared; arguments as for ``offline.solve``."""

    heat_TLE: Counts
    ranks: int
    slots: int
    source_RLE: Float64 | None
    topology: Topology
    deployed_LRS: Int32 | None
    prior_TLE: Counts | None

    def solved(self, settings: PlannerSettings, layers: slice = slice(None)) -> Solution:
        """By these settings, for some layers alone where ``layers`` says so."""
        from eplb_service import offline

        return offline.solve(
            self.heat_TLE[:, layers],
            self.ranks,
            self.slots,
            placement=None if self.deployed_LRS is None else self.deployed_LRS[layers],
            prior=None if self.prior_TLE is None else self.prior_TLE[:, layers],
            source_heat=None if self.source_RLE is None else self.source_RLE[None, :, layers],
            topology=self.topology,
            **{field.name: getattr(settings, field.name) for field in fields(settings)},
        )


@dataclass(frozen=True)
class _Found:
    """A placement and what is reported of it.

    Parameters
    ----------
    solution
        The placement as the settings ask for it.
    even
        The same for a host that splits tokens evenly over replicas; ``None`` where the settings say so already.
    policy, steps
        Policy, and steps of the trace.
    milliseconds
        Time of the search.
    par_fixed_tables
        PAR with the engines' own fixed tables.
    split_worth
        What a stepwise split costs and wins; ``None`` without one, or without a cost curve.
    """

    solution: Solution
    even: Solution | None
    policy: str
    steps: int
    milliseconds: float
    par_fixed_tables: float
    split_worth: SplitWorth | None = None


def _found(asked: _Problem, settings: PlannerSettings, solution: Solution, milliseconds: float) -> _Found:
    """The solution beside what other hosts would make of the same heat."""
    solved = Placement(solution.phy2log, asked.heat_TLE.shape[2])
    own_RLE = first_tables(solved, settings.split, settings.deal_width)
    fixed = split_steps(asked.heat_TLE, solved, own_RLE, asked.source_RLE, settings.split)
    even = split_worth = None
    if settings.split == TABLES:
        even = asked.solved(replace(settings, split=EVEN, budget_ms=None))
    if settings.split == STEP and settings.cost_curve is not None:
        by_tables = asked.solved(replace(settings, split=TABLES, budget_ms=None))
        split_worth = SplitWorth.of(settings, asked.heat_TLE, solved, solution, by_tables)
    fixed_par = float(mean_par(fixed.par_K))
    return _Found(
        solution, even, settings.policy, asked.heat_TLE.shape[0], milliseconds, fixed_par, split_worth
    )


def _print(found: _Found, out: Path | None) -> None:
    solution, even = found.solution, found.even
    layers, ranks, slots = solution.phy2log.shape
    console = output_console()
    console.print(
        f"{found.policy}: {layers} layers x {solution.log2phy.shape[2]} experts on {ranks} ranks x {slots} slots"
    )
    console.print(_table(solution), soft_wrap=False)
    console.print(
        f"PAR: hottest rank over mean rank in each of {found.steps} steps, mean over steps; "
        "hottest rank: its tokens per step."
    )
    if solution.ms_before is not None:
        console.print(
            f"Under the cost curve the slowest ranks of all layers take {solution.ms_after:.3f} ms of a step, before "
            f"{solution.ms_before:.3f} ms."
        )
    if found.split_worth is not None:
        console.print(str(found.split_worth), markup=False)
    if even is not None:
        console.print(
            "For a host that itself spreads an expert's tokens evenly over its replicas (vLLM), --split even reaches "
            f"PAR {even.par_after:.3f}, hottest rank {even.hottest_after_L.mean():,.2f}."
        )
    if out is not None and out.suffix != ".npz":
        console.print(
            f"{out.suffix[1:].upper()} holds no tables; with its host's own, PAR is {found.par_fixed_tables:.3f}."
        )
    written = "nothing is written without --out" if out is None else f"written to {out}"
    console.print(f"Solved in {found.milliseconds:.0f} ms; {written}.")


def _table(solution: Solution) -> Table:
    """All layers together, then those that are worst afterwards."""
    table = compact_table("layer", "PAR before", "after", "hottest rank before", "after", "moves")
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


def _document(found: _Found) -> dict[str, Any]:
    solution, even, split = found.solution, found.even, found.split_worth
    layers, ranks, slots = solution.phy2log.shape
    return {
        "policy": found.policy,
        "steps": found.steps,
        "layers": layers,
        "experts": solution.log2phy.shape[2],
        "ranks": ranks,
        "slots": slots,
        "par_before": solution.par_before,
        "par_after": solution.par_after,
        "par_after_fixed_tables": found.par_fixed_tables,
        "par_after_split_even": None if even is None else even.par_after,
        "moe_ms_before": solution.ms_before,
        "moe_ms_after": solution.ms_after,
        "moe_ms_by_tables": None if split is None else split.ms_by_tables,
        "split_ms": None if split is None else split.ms,
        "split": None if split is None else asdict(split.cost),
        "replicas_woken_per_rank": None if split is None else split.woken,
        "moves": solution.moves,
        "solve_ms": found.milliseconds,
        "par_before_per_layer": solution.par_before_L,
        "par_after_per_layer": solution.par_after_L,
        "hottest_before_per_layer": solution.hottest_before_L,
        "hottest_after_per_layer": solution.hottest_after_L,
        "hottest_after_split_even_per_layer": None if even is None else even.hottest_after_L,
        "moves_per_layer": solution.moves_L,
        "verdicts": [verdict.reason for verdict in solution.verdicts],
    }
