"""``eplb replay``: what each policy would have realised along a recorded trace, as a table, JSON, report and charts."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

import eplb_service
from eplb_service.atomic_write import check_output, write_atomically
from eplb_service.cli.options import JSON, RESULTS, SEVERAL, UserError, option, takes_options, whole_numbers
from eplb_service.cli.output import output_console, print_json, progress_bar, rows_table, write_json
from eplb_service.cli.trace_options import (
    HEAT,
    RAY,
    WORKERS,
    CostOptions,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    StartOptions,
    planner_flags,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.placement import mean_par
from eplb_service.planner.settings import POLICIES, PlannerSettings, planner_settings

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.costs import Assumption, Costs
    from eplb_service.replay.policy import Job
    from eplb_service.replay.result import PolicyReplay, Replay, ReplayedDecision

_COMPARED = "What is compared"
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 12

WINDOW = option("512", "Steps that a decision looks at, at most; several with commas.", metavar=SEVERAL)
INTERVAL = option("256", "Steps between decisions; several with commas.", metavar=SEVERAL)
OUT = option(None, "Write all figures to this .json file.", section=RESULTS)


@takes_options(*planner_flags("policy"))
def replay(
    group: RankOptions,
    layout: SlotOptions,
    start: StartOptions,
    cost: CostOptions,
    reading: ReadingOptions,
    heat: Path = HEAT,
    policy: str = option(
        ",".join(POLICIES),
        "Policies to score, with commas: none, deepseek, flashlb, its ablations ('all' names them), or your "
        "module:function.",
        metavar=SEVERAL,
        section=_COMPARED,
    ),
    window: str = WINDOW,
    interval: str = INTERVAL,
    hindsight: bool = option(
        True, "Also fit placements on the very steps served, and show the regret.", section=_COMPARED
    ),
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
    what all policies have done by then.
    """
    _check_outputs(out, report, charts)
    settings = planner_settings(planner)
    from eplb_service.replay.jobs import TraceFile, check_jobs, jobs_for, replay_file, setups_of
    from eplb_service.replay.loop import Scene

    file = TraceFile(heat, reading.reading())
    trace = reading.open(heat)
    costs = cost.costs(settings, trace, group.ranks)
    counts = layout.counts(trace.experts, group.ranks)
    start_LRS = start.placed(trace, group.ranks, counts)
    prior_TLE = start.prior_heat(trace, reading)
    if prior_TLE is not None:
        if len(counts) > 1:
            raise UserError("--prior places experts on one number of slots; give --slots one")
        compile_solver()
        from eplb_service import offline

        shape, topology = (group.ranks, counts[0]), group.topology(trace)
        start_LRS = offline.solve(prior_TLE, *shape, topology=topology, **vars(settings)).phy2log
    scene = Scene(group.topology(trace), costs, start_LRS)
    windows, intervals = whole_numbers("--window", window), whole_numbers("--interval", interval)
    setups = setups_of(windows, intervals, counts)
    jobs = jobs_for(policies_of(policy), setups, settings, hindsight=hindsight)
    check_jobs(jobs, trace, scene)
    compile_solver()
    with replay_progress(jobs, trace.steps) as advance:
        result = replay_file(file, jobs, scene, workers=workers, ray=ray, on_progress=advance)
    rests_on = cost.assumptions(settings, costs)
    if report is not None:
        _write_report(report, result, heat.name, _facts(trace, settings, costs, rests_on))
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
    from eplb_service.replay.policy import NAMES

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("all",):
        return NAMES
    unknown = [name for name in names if name not in NAMES and ":" not in name]
    if unknown or not names:
        found = ", ".join(map(repr, unknown)) or "nothing"
        raise UserError(f"--policy names {found}; choose among {', '.join(NAMES)}, or give module:function")
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
    score = result.score(policy)
    return {
        "policy": policy.policy,
        "slots": policy.setup.slots,
        "window_steps": policy.setup.window,
        "interval_steps": policy.setup.interval,
        "par_realised": policy.par_realised,
        "par_left_alone": score.par_left_alone,
        "noise_floor": score.floor,
        "par_hindsight": score.hindsight,
        "regret": score.regret,
        "par_planned": policy.par_planned,
        "moves": policy.moves,
        "bytes_moved": score.bytes_moved,
        "moe_ms_per_step": score.moe_ms,
        "moe_ms_per_step_left_alone": score.moe_ms_left_alone,
        "saved_ms_per_step": score.saved_ms,
        "stall_ms_per_step": score.stall_ms,
        "solve_ms_mean": policy.seconds_mean * 1e3,
        "solve_ms_max": policy.seconds_max * 1e3,
    }


def _check_outputs(out: Path | None, report: Path | None, charts: Path | None) -> None:
    """Raise ``OutputError`` or ``UserError`` where a result could not be written, before long work begins."""
    for path, suffix in ((out, ".json"), (report, ".html")):
        if path is not None:
            check_output(path, (suffix,))
    if charts is not None:
        if charts.exists() and not charts.is_dir():
            raise UserError(f"--charts {charts}: exists and is not a folder")
        above = charts.resolve().parent
        if not above.is_dir():
            raise UserError(f"--charts {charts}: the folder {above} does not exist; create it first")


def _write_report(path: Path, result: Replay, trace: str, facts: dict[str, str]) -> None:
    from eplb_service.report.page import report_page

    command = shlex.join(["eplb", *sys.argv[1:]])
    page = report_page(result, title=f"Replay of {trace}", command=command, facts=facts)
    write_atomically(path, page.encode())


def _facts(
    trace: Trace, settings: PlannerSettings, costs: Costs, rests_on: Sequence[Assumption]
) -> dict[str, str]:
    """Trace, settings and stated costs, for a reader to judge the report by."""
    stated = {name: value for name, value in vars(settings).items() if name not in ("policy", "threads")}
    return {
        "trace": f"{trace.facts.origin}; {trace.steps:,} steps, {trace.layers} layers, {trace.experts} experts"
        + ("" if trace.source_rows(0, 1) is None else f"; tokens by source of {trace.facts.ranks} ranks"),
        **({"batching": trace.facts.batching} if trace.facts.batching else {}),
        **({"model": trace.facts.model} if trace.facts.model else {}),
        "planner": ", ".join(f"{name} {value}" for name, value in stated.items() if value is not None),
        "costs": "; ".join(map(str, rests_on))
        + ("" if costs.step_ms or costs.curve is not None else "; no times are given, and nothing is late"),
        "made by": f"eplb {eplb_service.__version__}",
    }


def _print(console: Console, result: Replay, rests_on: Sequence[Assumption]) -> None:
    """Print a table with one row per policy; the curves of all policies share one scale."""
    curves = [_curve(policy) for policy in result.policies]
    # Parts of a trace without tokens have no ratio.
    known = [value for values in curves for value in values if not math.isnan(value)]
    low, high = min(known, default=math.nan), max(known, default=math.nan)
    rows = []
    for policy, values in zip(result.policies, curves, strict=True):
        score, slots = result.score(policy), result.layers * result.ranks * policy.setup.slots
        row = {"policy": policy.label}
        if score.moe_ms is not None:
            row["MoE ms"] = f"{score.moe_ms:.3f}"
        row["PAR"] = f"{policy.par_realised:.3f}"
        if score.regret is not None:
            row["regret"] = f"{score.regret:.3f}"
        row["moves each"] = f"{policy.moves_per_decision:.1f} ({policy.moves_per_decision / slots:.0%})"
        row["solve ms"] = f"{policy.seconds_mean * 1e3:.1f}"
        rows.append({**row, "along": "".join(_block(value, low, high) for value in values)})
    console.print(_headline(result))
    console.print(rows_table(rows), soft_wrap=False)
    for line in _footnotes(result, low, high):
        console.print(line)
    console.print(f"This rests on: {'; '.join(map(str, rests_on))}.", markup=False)


def _document(result: Replay, rests_on: Sequence[Assumption]) -> dict[str, Any]:
    """All figures of a replay, as JSON has them."""
    setup, costs = result.baselines[0].setup, result.costs
    return {
        "layers": result.layers,
        "experts": result.experts,
        "ranks": result.ranks,
        "slots": setup.slots,
        "window_steps": setup.window,
        "interval_steps": setup.interval,
        "first_step_scored": result.first,
        "steps_scored": result.steps,
        "interrupted": result.interrupted,
        "costs": costs.plain(),
        "assumptions": rests_on,
        "policies": {policy.label: _policy_document(result, policy) for policy in result.policies},
    }


def _curve(policy: PolicyReplay) -> list[float]:
    """Realised PAR along the trace in at most ``_CURVE_WIDTH`` stretches of decisions; NaN of those without tokens."""
    values = [decision.par_realised for decision in policy.decisions]
    stretches = np.array_split(values, min(_CURVE_WIDTH, len(values)))
    return [float(mean_par(stretch)) for stretch in stretches]


def _headline(result: Replay) -> str:
    slots = sorted({policy.setup.slots for policy in result.policies})
    decisions = sorted({len(policy.decisions) for policy in result.policies})
    return (
        f"{result.layers} layers x {result.experts} experts on {result.ranks} ranks x "
        f"{' or '.join(map(str, slots))} slots; steps scored {result.steps}, "
        f"decisions {' or '.join(map(str, decisions))}"
        + ("; stopped early, all policies up to the same decision" if result.interrupted else "")
    )


def _footnotes(result: Replay, low: float, high: float) -> list[str]:
    lines = [
        f"PAR: hottest rank over mean rank in each step; curves from {low:.2f} to {high:.2f}. "
        + _seen_and_served(result),
        f"{_left_alone(result)} Regret: above the best that hindsight knows.",
    ]
    if result.costs.curve is not None:
        best = min(result.policies, key=lambda policy: policy.moe_ms or 0.0)
        fewest = min(result.policies, key=lambda policy: policy.setup.slots)
        left_alone, moe_ms = result.moe_ms_left_alone(fewest) or 0.0, best.moe_ms or 0.0
        lines.append(
            f"MoE ms: the slowest ranks of all layers in a step{_with_split(result)}. "
            f"Left alone on {fewest.setup.slots} slots {left_alone:.3f}; {best.label} saves "
            f"{left_alone - moe_ms:.3f} ms, and its switches cost {result.score(best).stall_ms:.3f} ms."
        )
    elif result.costs.step_ms:
        best = min(result.policies, key=lambda policy: policy.par_realised)
        won = result.score(best)
        lines.append(
            f"{best.label} saves {won.saved_ms:.2f} ms of a step of {result.costs.step_ms:g} ms, against experts "
            f"left alone on as many slots; its switches cost {won.stall_ms:.3f} ms of it."
        )
    return lines


def _seen_and_served(result: Replay) -> str:
    setups = {policy.setup for policy in result.policies}
    windows = sorted({(setup.window, setup.window > setup.interval) for setup in setups})
    seen = " or ".join(f"{'up to ' * looks_back}{window}" for window, looks_back in windows)
    served = " or ".join(map(str, sorted({setup.interval for setup in setups})))
    return f"Each decision sees {seen} steps and serves {served}."


def _left_alone(result: Replay) -> str:
    """By number of slots, which the placement at the start hangs on."""
    scores = {policy.setup.slots: result.score(policy) for policy in reversed(result.policies)}
    alone = [f"{score.par_left_alone:.3f} on {slots} slots" for slots, score in sorted(scores.items())]
    floors = [f"{score.floor:.3f}" for score in scores.values()]
    floor = min(floors) if min(floors) == max(floors) else f"{min(floors)} to {max(floors)}"
    text = alone[0].partition(" on ")[0] if len(alone) == 1 else ", ".join(alone)
    return f"Left alone it is {text}; token sampling alone leaves about {floor}."


def _with_split(result: Replay) -> str:
    split = result.costs.split
    if split is None:
        return ""
    return f", and where it is split {split.ms_of_step(result.layers):.3f} ms for the split itself"


def _block(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    height = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[round(height * (len(_BLOCKS) - 1))]


def _policy_document(result: Replay, policy: PolicyReplay) -> dict[str, Any]:
    return {
        **policy_figures(result, policy),
        "par_realised_per_layer": policy.par_realised_L,
        "decisions": [
            {
                "step": decision.step,
                "steps": decision.steps,
                "steps_before_it_took_effect": decision.late,
                "layers_changed": decision.layers_changed,
                "moves": decision.moves,
                "par_seen": decision.par_seen,
                "par_planned": decision.par_planned,
                "par_realised": decision.par_realised,
                "solve_ms": decision.seconds * 1e3,
            }
            for decision in policy.decisions
        ],
    }
