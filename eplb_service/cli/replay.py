"""``eplb replay``: what each policy would have realised along a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError
from eplb_service.cli.json_out import print_json, write_json
from eplb_service.cli.numbers import whole_numbers
from eplb_service.cli.planner_options import (
    NodesOption,
    TokenGroupOption,
    takes_planner_settings,
    topology_of,
)
from eplb_service.cli.replay_progress import replay_progress
from eplb_service.cli.replay_report import print_replay, replay_document
from eplb_service.cli.report_file import check_charts, report_facts, write_charts, write_report
from eplb_service.cli.resumable import Resumable, ResumeOption
from eplb_service.cli.trace_options import (
    AsOption,
    BatchOption,
    ExpertsOption,
    HeatOption,
    MapOption,
    reading,
)
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.placement_file import read_placement
from eplb_service.io.routes import DEFAULT_BATCH
from eplb_service.planner.options import planner_settings
from eplb_service.planner.settings import POLICIES
from eplb_service.replay.costs import Costs

_COSTS = Costs()


@takes_planner_settings("policy")
def replay(
    heat: HeatOption,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the expert-parallel group.")],
    slots: Annotated[
        str | None, typer.Option(help="Expert slots per rank and layer; several with commas.")
    ] = None,
    redundant: Annotated[
        str | None,
        typer.Option(help="Slots per layer beyond one per expert, instead of --slots; several with commas."),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(help="Placement at the start (.npz, .json, .yaml, .pt); in order where not given."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Policies to score, with commas between: "
            "none, deepseek, flashlb, flashlb-no-tree and other ablations ('all' names them), or your module:function."
        ),
    ] = ",".join(POLICIES),
    window: Annotated[str, typer.Option(help="Steps that a decision looks at; several with commas.")] = "256",
    interval: Annotated[str, typer.Option(help="Steps between decisions; several with commas.")] = "256",
    nodes: NodesOption = None,
    token_group: TokenGroupOption = 1,
    step_ms: Annotated[
        float, typer.Option(help="Time of a model step; 0: decisions take effect at once.")
    ] = 0.0,
    moe_share: Annotated[
        float, typer.Option(help="Part of a step that the hottest rank decides.")
    ] = _COSTS.moe_share,
    bytes_per_expert: Annotated[int, typer.Option(min=0, help="Weights of one expert in one layer.")] = 0,
    bandwidth: Annotated[
        float, typer.Option(help="GB a second that a rank receives while it serves.")
    ] = _COSTS.bandwidth / 1e9,
    solve_ms: Annotated[float, typer.Option(help="From the end of a window to the plan.")] = _COSTS.solve_ms,
    commit_ms: Annotated[
        float, typer.Option(help="Standstill of all ranks a switched layer.")
    ] = _COSTS.commit_ms,
    hindsight: Annotated[
        bool, typer.Option(help="Also fit a placement on the very steps served, and tell regret.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as cores by default.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run on the Ray cluster at this address ('local': here).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write every decision to this .json file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report with charts to this .html file.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write the charts as .png into this folder.")] = None,
    resume: ResumeOption = None,
    read_as: AsOption = None,
    map: MapOption = None,
    experts: ExpertsOption = None,
    batch: BatchOption = DEFAULT_BATCH,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    **planner: Any,
) -> None:
    """Run the planner along a trace: decide on a window, serve the next steps under the decision, and score those.

    All policies start from the same placement and are scored over the same steps, those after the first window.
    Windows, intervals and slots with several values are run in all combinations. Ctrl-C ends the work, still tells,
    writes and draws what all policies have done by then, and leaves a state file that --resume goes on from.
    """
    if out is not None:
        check_output(out, (".json",))
    if report is not None:
        check_output(report, (".html",))
    if png is not None:
        check_charts(png)
    settings = planner_settings(planner)
    costs = Costs(step_ms, moe_share, bytes_per_expert, bandwidth * 1e9, solve_ms, commit_ms)
    windows, intervals = whole_numbers("--window", window), whole_numbers("--interval", interval)
    names = policies_of(policy)
    from eplb_service.replay import jobs as replay_jobs
    from eplb_service.replay import runner

    file = replay_jobs.TraceFile(heat, reading(read_as, map, experts, batch))
    trace = file.open()
    slot_counts = slots_of(trace.experts, ranks, slots, redundant)
    start = read_placement(placement, trace.experts, ranks).phy2log_LRS if placement else None
    if start is not None and {start.shape[2]} != set(slot_counts):
        raise UserError(f"--placement has {start.shape[2]} slots a rank, asked for {slot_counts}")
    scene = replay_jobs.Scene(topology_of(ranks, nodes, token_group, trace), costs, start)
    jobs = runner.jobs_for(
        names, runner.schedules(windows, intervals, slot_counts), settings, hindsight=hindsight
    )
    for job in jobs:
        job.setup.schedule.decisions(trace.steps)
        scene.placement(trace, job.setup)
        if job.policy is not None and job.policy.target:
            job.policy.external()
    work = Resumable(resume)
    ledger = work.ledger(jobs, trace, scene)
    compile_solver()
    with work.kept(), replay_progress(jobs, trace.steps, ledger.decisions) as advance:
        result = runner.replay_file(
            file, jobs, scene, workers=workers, ray=ray, on_progress=advance, ledger=ledger
        )
    if report is not None:
        write_report(report, result, f"Replay of {heat.name}", report_facts(trace, settings, costs))
    if png is not None:
        write_charts(png, result)
    document = replay_document(result)
    if out is not None:
        write_json(out, document)
    if json:
        print_json(document)
    else:
        print_replay(Console(soft_wrap=True, highlight=False), result)
    if result.interrupted:
        work.leave()
        raise typer.Exit(130)
    work.finish()


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


def slots_of(experts: int, ranks: int, slots: str | None, redundant: str | None) -> list[int]:
    """Slots a rank, of either option; raises ``UserError`` where they do not spread evenly."""
    if slots is not None and redundant is not None:
        raise UserError("give either --slots or --redundant")
    if slots is not None:
        return whole_numbers("--slots", slots)
    counts = []
    for count in whole_numbers("--redundant", redundant or str(-experts % ranks), least=0):
        total = experts + count
        if total % ranks:
            raise UserError(
                f"{experts} experts and {count} redundant ones do not spread evenly over {ranks} ranks; "
                f"use --redundant {-experts % ranks} or that plus a multiple of {ranks}"
            )
        counts.append(total // ranks)
    return counts
