"""``eplb replay``: realised PAR and costs of each policy on a recorded trace, as a table, JSON, a report and charts."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

import eplb_service
from eplb_core.atomic_write import check_output, write_atomically
from eplb_core.planner.settings import (
    DECISION_INTERVAL,
    POLICIES,
    WINDOW_STEPS,
    PlannerSettings,
    planner_settings,
)
from eplb_service.cli.file_options import (
    HEAT,
    PLACEMENT,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    read_start_placement,
)
from eplb_service.cli.options import JSON, RESULTS, SEVERAL, UserError, option, takes_options, whole_numbers
from eplb_service.cli.output import figure, output_console, print_json, progress_bar, table_of, write_json
from eplb_service.cli.planner_options import (
    RAY,
    WORKERS,
    CostOptions,
    as_recorded,
    assumptions_text,
    check_groups,
    check_windows,
    planner_flags,
)
from eplb_service.cli.warmup import compile_solver

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.costs import Assumption, Costs
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import PolicyReplay, Replay, ReplayedDecision

_COMPARISON = "Policies and schedules"

WINDOW = option(
    str(WINDOW_STEPS),
    "Maximum number of steps that a decision uses; separate several values with commas.",
    metavar=SEVERAL,
)
INTERVAL = option(
    str(DECISION_INTERVAL),
    "Steps between decisions (the maximum for flashlb); separate several values with commas.",
    metavar=SEVERAL,
)
CPU_SHARE = option(
    None,
    "CPU cores that decisions may use on average, as in the service; needs --step-ms. With this option, results "
    "depend on the speed of this machine. By default, CPU use is not limited.",
    section=_COMPARISON,
)
OUT = option(None, "Write all figures to this .json file.", section=RESULTS)

TERMS = (
    "PAR: load of the hottest rank over the mean rank load; initial: PAR with the initial placement; floor: PAR that "
    "token sampling gives a perfectly balanced placement; moves: per interval."
)
"""Explanation that is printed below the tables."""


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
        "Policies to score, separated by commas: none, deepseek, flashlb, the ablations of flashlb ('all' selects all "
        "of these), or your own module:function.",
        metavar=SEVERAL,
        section=_COMPARISON,
    ),
    window: str = WINDOW,
    interval: str = INTERVAL,
    cpu_share: float | None = CPU_SHARE,
    hindsight: bool = option(
        True, "Also fit placements to the scored steps themselves, and show the regret."
    ),
    workers: int | None = WORKERS,
    ray: str | None = RAY,
    out: Path | None = OUT,
    report: Path | None = option(None, "Write a report with charts to this .html file."),
    charts: Path | None = option(None, "Write the charts as .svg files into this folder."),
    json: bool = JSON,
    **planner: Any,
) -> None:
    """Replay the planner on a trace, and score each decision on the steps that follow it.

    All policies start from the same placement and are scored on the same steps: those after the first decision. All
    combinations of windows, intervals and slots are replayed. Ctrl-C stops the replay and shows the policies that have
    finished.
    """
    _check_outputs(out, report, charts)
    settings = planner_settings(planner)
    from eplb_service.replay.jobs import TraceFile, check_jobs, jobs_for, replay_file, setups_of
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    settings = as_recorded(settings, trace, planner)
    counts = layout.counts(trace.experts, group.ranks)
    start_LRS = read_start_placement(placement, trace, group.ranks)
    costs = cost.costs(settings, trace, group.ranks)
    scene = Scene(group.topology(trace), costs, start_LRS)
    windows = whole_numbers("--window", window)
    intervals = whole_numbers("--interval", interval)
    setups = setups_of(windows, intervals, counts)
    jobs = jobs_for(policies_of(policy), setups, settings, hindsight=hindsight)
    if cpu_share is not None:
        jobs = [replace(job, cpu_ms=_cpu_ms(cpu_share, costs)) for job in jobs]
    check_jobs(jobs, trace, scene)
    check_groups(settings, trace.experts, counts, scene.topology)
    check_windows(windows, intervals)
    compile_solver()
    with replay_progress(jobs, trace.steps) as advance:
        result = replay_file(file, jobs, scene, workers=workers, ray=ray, on_progress=advance)
    assumptions = cost.assumptions(settings, costs)
    if report is not None:
        _write_report(report, result, heat, trace, settings, assumptions)
    if charts is not None:
        from eplb_service.report.pictures import write_pictures

        write_pictures(charts, result)
    document = _document(result, assumptions)
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        _print(output_console(), result, assumptions)
    if result.interrupted:
        raise typer.Exit(130)


def _cpu_ms(cpu_share: float, costs: Costs) -> float:
    """Return the CPU budget of decisions per step, in milliseconds."""
    if not cpu_share > 0:
        raise UserError(f"--cpu-share is {cpu_share:g}; it must be greater than 0")
    if not costs.step_ms:
        raise UserError("--cpu-share needs --step-ms, because the budget is a share of each step's time")
    return cpu_share * costs.step_ms


def policies_of(text: str, flag: str = "--policy") -> tuple[str, ...]:
    """Parse the policies in the option ``flag``, dropping duplicates.

    Raises ``UserError`` if there are none or one is unknown.
    """
    from eplb_core.planner.policies import NAMES, registered

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("all",):
        return NAMES
    available = (*NAMES, *registered())
    unknown = [name for name in names if name not in available and ":" not in name]
    if unknown or not names:
        shown = ", ".join(map(repr, unknown)) or "nothing"
        raise UserError(
            f"{flag} contains {shown}; choose from {', '.join(available)}, or use module:function; install "
            "eplb-lab[peers] for engines' balancers"
        )
    return names


@contextmanager
def replay_progress(jobs: Sequence[Job], steps: int) -> Iterator[Callable[[str, ReplayedDecision], None]]:
    """Show the progress of all jobs in one bar. Yields a function that accepts a job's label and its new decision."""
    total = sum(len(job.setup.decisions(steps)) for job in jobs)
    with progress_bar("decisions", total, MofNCompleteColumn(), TimeRemainingColumn()) as update:
        yield lambda label, decision: update(
            advance=1, description=f"decisions; {label}: PAR {decision.par_realised:.3f}"
        )


def policy_figures(result: Replay, policy: PolicyReplay) -> dict[str, Any]:
    """Return a policy's figures over all its decisions, keyed by JSON key."""
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
    """Return a table with a row for each result of ``policy_figures``. Times appear only if they are known."""
    has_times = any(row["saved_ms"] or row["moe_ms"] is not None for row in figures)
    return table_of(
        figures,
        {
            "policy": lambda row: row["label"],
            "MoE ms": lambda row: figure(row["moe_ms"]),
            "PAR": lambda row: figure(row["par"]),
            "initial": lambda row: figure(row["par_left_alone"]),
            "floor": lambda row: figure(row["floor"]),
            "regret": lambda row: figure(row["regret"]),
            "net ms": lambda row: _net_ms(row) if has_times else None,
            "moves": lambda row: figure(row["moves_per_interval"], ",.1f"),
            "solve ms": lambda row: figure(row["solve_ms_mean"], ".1f"),
        },
        title=title,
    )


def _net_ms(row: Mapping[str, Any]) -> str | None:
    saved_ms = row["saved_ms"]
    return None if saved_ms is None else figure(saved_ms - row["stall_ms"], ",.3f")


def _check_outputs(out: Path | None, report: Path | None, charts: Path | None) -> None:
    """Before the replay starts, check that all results can be written. Raises ``OutputError`` or ``UserError``."""
    for path, suffix in ((out, ".json"), (report, ".html")):
        if path is not None:
            check_output(path, (suffix,))
    if charts is not None and not (
        charts.is_dir() or (charts.resolve().parent.is_dir() and not charts.exists())
    ):
        raise UserError(f"--charts is {charts}; expected a folder, or a new name in an existing folder")


def _write_report(
    path: Path,
    result: Replay,
    heat: Path,
    trace: Trace,
    settings: PlannerSettings,
    assumptions: Sequence[Assumption],
) -> None:
    """Write the HTML report, including facts about the trace, the settings and the costs."""
    from eplb_service.report.page import report_page

    page = report_page(
        result,
        title=f"Replay of {heat.name}",
        command=this_command(),
        facts=report_facts(trace, settings),
        assumptions=assumptions,
    )
    write_atomically(path, page.encode())


def this_command() -> str:
    """Return the command line of this process, without the secret in ``--token``."""
    arguments = [
        "..." if before == "--token" else re.sub("^--token=.*", "--token=...", argument)
        for before, argument in pairwise(sys.argv)
    ]
    return shlex.join(["eplb", *arguments])


def report_facts(trace: Trace, settings: PlannerSettings) -> dict[str, str]:
    """Return facts about a trace and the settings for a report, keyed by name."""
    planner = {name: value for name, value in vars(settings).items() if name not in ("policy", "threads")}
    return {
        "trace": f"{trace.facts.origin}; {trace.steps:,} steps, {trace.layers} layers, {trace.experts} experts",
        "model": trace.facts.model or "not recorded",
        "planner": ", ".join(f"{name} {value}" for name, value in planner.items() if value is not None),
        "created by": f"eplb {eplb_service.__version__}",
    }


def _print(console: Console, result: Replay, assumptions: Sequence[Assumption]) -> None:
    """Print the table with a row for each policy."""
    intervals = sorted({len(policy.decisions) for policy in result.policies})
    console.print(
        f"{result.layers} layers x {result.experts} experts on {result.ranks} ranks; steps scored {result.steps}, "
        f"intervals {' or '.join(map(str, intervals))}"
        + ("; stopped early, unfinished policies omitted" if result.interrupted else "")
    )
    figures = [policy_figures(result, policy) for policy in result.policies]
    console.print(figures_table(figures), soft_wrap=False)
    console.print(TERMS)
    console.print(assumptions_text(assumptions))


def _document(result: Replay, assumptions: Sequence[Assumption]) -> dict[str, Any]:
    """Return all figures of a replay, keyed by JSON key."""
    policies = {
        policy.label: {
            **policy_figures(result, policy),
            "par_L": policy.par_realised_L,
            "decisions": [
                {
                    name: value
                    for name, value in vars(decision).items()
                    if not name.endswith(("_L", "_LR", "_T"))
                }
                | {"par": decision.par_realised}
                for decision in policy.decisions
            ],
        }
        for policy in result.policies
    }
    shape = {name: getattr(result, name) for name in ("layers", "experts", "ranks", "first", "steps")}
    return {
        **shape,
        "interrupted": result.interrupted,
        "costs": result.costs.plain(),
        "assumptions": assumptions,
        "policies": policies,
    }
