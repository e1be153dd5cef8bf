"""``eplb replay``: what each policy would have realised along a recorded trace, as a table, JSON, report and charts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

import eplb_service
from eplb_core.atomic_write import check_output, write_atomically
from eplb_core.planner.settings import POLICIES, PlannerSettings, planner_settings
from eplb_service.cli.options import JSON, RESULTS, SEVERAL, UserError, option, takes_options, whole_numbers
from eplb_service.cli.output import figure, output_console, print_json, progress_bar, table_of, write_json
from eplb_service.cli.trace_options import (
    HEAT,
    PLACEMENT,
    RAY,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    basis_text,
    check_groups,
    check_windows,
    placed_at_start,
    planner_flags,
)
from eplb_service.cli.warmup import compile_solver

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.costs import Assumption
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import PolicyReplay, Replay, ReplayedDecision

_COMPARED = "What is compared"

WINDOW = option("512", "Steps that a decision looks at, at most; several with commas.", metavar=SEVERAL)
INTERVAL = option("256", "Steps between decisions, of flashlb at most; several with commas.", metavar=SEVERAL)
OUT = option(None, "Write all figures to this .json file.", section=RESULTS)


@takes_options(*planner_flags("policy"))
def replay(
    group: RankOptions,
    layout: SlotOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    placement: Path | None = PLACEMENT,
    policy: str = option(
        ",".join(POLICIES),
        "Policies to score, with commas: none, deepseek, flashlb, its ablations ('all' names them), or your "
        "module:function.",
        metavar=SEVERAL,
        section=_COMPARED,
    ),
    window: str = WINDOW,
    interval: str = INTERVAL,
    hindsight: bool = option(True, "Also fit placements on the very steps served, and show the regret."),
    workers: int | None = WORKERS,
    ray: str | None = RAY,
    out: Path | None = OUT,
    report: Path | None = option(None, "Write a report with charts to this .html file."),
    charts: Path | None = option(None, "Write the charts as .svg into this folder."),
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Run the planner along a trace and score what each decision realises in the steps after it.

    All policies start from the same placement and are scored over the same steps, those after the first decision.
    Windows, intervals and slots with several values are run in all combinations. Ctrl-C ends the work, and still shows
    the policies that are done by then.
    """
    _check_outputs(out, report, charts)
    settings = planner_settings(planner)
    from eplb_service.replay.jobs import TraceFile, check_jobs, jobs_for, replay_file, setups_of
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    counts = layout.counts(trace.experts, group.ranks)
    start_LRS = placed_at_start(placement, trace, group.ranks)
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs, start_LRS)
    windows = whole_numbers("--window", window)
    intervals = whole_numbers("--interval", interval)
    setups = setups_of(windows, intervals, counts)
    jobs = jobs_for(policies_of(policy), setups, settings, hindsight=hindsight)
    check_jobs(jobs, trace, scene)
    check_groups(settings, trace.experts, counts, scene.topology)
    check_windows(windows, intervals)
    compile_solver()
    with replay_progress(jobs, trace.steps) as advance:
        result = replay_file(file, jobs, scene, workers=workers, ray=ray, on_progress=advance)
    rests_on = cost.assumptions(settings, costs)
    if report is not None:
        _write_report(report, result, heat, trace, settings, rests_on)
    if charts is not None:
        from eplb_service.report.pictures import write_pictures

        write_pictures(charts, result)
    document = _document(result, rests_on)
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), result, rests_on)
    if result.interrupted:
        raise typer.Exit(130)


def policies_of(text: str) -> tuple[str, ...]:
    """The policies that ``--policy`` names, each once; raises ``UserError`` where there are none or an unknown one."""
    from eplb_core.planner.policies import NAMES, registered

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("all",):
        return NAMES
    unknown = [name for name in names if name not in (*NAMES, *registered()) and ":" not in name]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or "nothing"
        raise UserError(
            f"--policy names {found}; choose among {', '.join((*NAMES, *registered()))}, or give "
            "module:function"
        )
    return names


@contextmanager
def replay_progress(jobs: Sequence[Job], steps: int) -> Iterator[Callable[[str, ReplayedDecision], None]]:
    """Show a bar for all jobs together, moved on by each call with a job's label and its decision."""
    total = sum(len(job.setup.decisions(steps)) for job in jobs)
    with progress_bar("decisions", total, MofNCompleteColumn(), TimeRemainingColumn()) as update:
        yield lambda label, made: update(
            advance=1, description=f"decisions; {label}: PAR {made.par_realised:.3f}"
        )


def policy_figures(result: Replay, policy: PolicyReplay) -> dict[str, Any]:
    """One policy's figures over all of its decisions, as JSON has them."""
    return {
        "label": policy.label,
        "policy": policy.policy,
        **vars(policy.setup),
        **vars(result.score(policy)),
        "par_planned": policy.par_planned,
        "moves": policy.moves,
        "moves_per_interval": policy.moves_per_interval,
        "solve_ms_mean": policy.seconds_mean * 1e3,
        "solve_ms_max": policy.seconds_max * 1e3,
    }


def figures_table(figures: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """A line for each of ``policy_figures``; times only where they are known."""
    timed = any(one["saved_ms"] or one["moe_ms"] is not None for one in figures)
    return table_of(
        figures,
        {
            "policy": lambda one: one["label"],
            "MoE ms": lambda one: figure(one["moe_ms"]),
            "PAR": lambda one: figure(one["par"]),
            "alone": lambda one: figure(one["par_left_alone"]),
            "floor": lambda one: figure(one["floor"]),
            "regret": lambda one: figure(one["regret"]),
            "net ms": lambda one: _net_ms(one) if timed else None,
            "moves": lambda one: figure(one["moves_per_interval"], ",.1f"),
            "solve ms": lambda one: figure(one["solve_ms_mean"], ".1f"),
        },
        title=title,
    )


def _net_ms(one: Mapping[str, Any]) -> str | None:
    saved_ms = one["saved_ms"]
    return None if saved_ms is None else figure(saved_ms - one["stall_ms"], ",.3f")


TERMS = (
    "PAR: hottest rank over mean rank; alone: experts left as they were; floor: what token sampling alone leaves; "
    "moves: per interval."
)
"""Under tables of figures."""


def _check_outputs(out: Path | None, report: Path | None, charts: Path | None) -> None:
    """Raise ``OutputError`` or ``UserError`` where a result could not be written, before long work begins."""
    for path, suffix in ((out, ".json"), (report, ".html")):
        if path is not None:
            check_output(path, (suffix,))
    if charts is not None and not (
        charts.is_dir() or (charts.resolve().parent.is_dir() and not charts.exists())
    ):
        raise UserError(f"--charts {charts}: is neither a folder nor a new name in one")


def _write_report(
    path: Path,
    result: Replay,
    heat: Path,
    trace: Trace,
    settings: PlannerSettings,
    rests_on: Sequence[Assumption],
) -> None:
    """Write the page, with what a reader judges it by: trace, settings and costs."""
    from eplb_service.report.page import report_page

    stated = {name: value for name, value in vars(settings).items() if name not in ("policy", "threads")}
    facts = {
        "trace": f"{trace.facts.origin}; {trace.steps:,} steps, {trace.layers} layers, {trace.experts} experts",
        "model": trace.facts.model or "not recorded",
        "planner": ", ".join(f"{name} {value}" for name, value in stated.items() if value is not None),
        "made by": f"eplb {eplb_service.__version__}",
    }
    command = shlex.join(["eplb", *sys.argv[1:]])
    page = report_page(
        result, title=f"Replay of {heat.name}", command=command, facts=facts, rests_on=rests_on
    )
    write_atomically(path, page.encode())


def _print(console: Console, result: Replay, rests_on: Sequence[Assumption]) -> None:
    """Print a line per policy."""
    intervals = sorted({len(policy.decisions) for policy in result.policies})
    console.print(
        f"{result.layers} layers x {result.experts} experts on {result.ranks} ranks; steps scored {result.steps}, "
        f"intervals {' or '.join(map(str, intervals))}"
        + ("; stopped early, without the policies not yet done" if result.interrupted else "")
    )
    figures = [policy_figures(result, policy) for policy in result.policies]
    console.print(figures_table(figures), soft_wrap=False)
    console.print(TERMS)
    console.print(basis_text(rests_on))


def _document(result: Replay, rests_on: Sequence[Assumption]) -> dict[str, Any]:
    """All figures of a replay, as JSON has them."""
    policies = {
        policy.label: {
            **policy_figures(result, policy),
            "par_L": policy.par_realised_L,
            "decisions": [
                {name: value for name, value in vars(made).items() if not name.endswith(("_L", "_LR"))}
                | {"par": made.par_realised}
                for made in policy.decisions
            ],
        }
        for policy in result.policies
    }
    shape = {name: getattr(result, name) for name in ("layers", "experts", "ranks", "first", "steps")}
    return {
        **shape,
        "interrupted": result.interrupted,
        "costs": result.costs.plain(),
        "assumptions": rests_on,
        "policies": policies,
    }
