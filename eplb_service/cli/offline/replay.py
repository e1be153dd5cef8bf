"""``eplb replay``: what each policy would have realised along a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from eplb_service.atomic_write import check_output
from eplb_service.cli.errors import UserError, whole_numbers
from eplb_service.cli.offline.replay_progress import replay_progress
from eplb_service.cli.offline.replay_report import print_replay, replay_document
from eplb_service.cli.offline.report_file import check_charts, report_facts, write_charts, write_report
from eplb_service.cli.offline.resumable import Resumable, ResumeOption, WorkersOption
from eplb_service.cli.offline.warmup import compile_solver
from eplb_service.cli.options.groups import option_groups
from eplb_service.cli.options.layout import CostOptions, RankOptions, SlotOptions
from eplb_service.cli.options.planner import takes_planner_settings
from eplb_service.cli.options.trace import HeatOption, ReadingOptions, check_tokens, choices_per_step
from eplb_service.cli.output.console import output_console
from eplb_service.cli.output.json_out import print_json, write_json
from eplb_service.cli.repeated import SEVERAL
from eplb_service.io.open_trace import naming
from eplb_service.planner.options import planner_settings
from eplb_service.planner.settings import POLICIES, PlannerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eplb_service.heat.window import Counts
    from eplb_service.io.trace import Trace
    from eplb_service.placement import Int32
    from eplb_service.replay.assumptions import Assumption
    from eplb_service.replay.jobs import Job, Scene
    from eplb_service.replay.result import Replay


@dataclass(frozen=True)
class ComparisonOptions:
    """Which policies are run, and when they decide."""

    SECTION: ClassVar = "What is compared"

    policy: Annotated[
        str,
        typer.Option(
            metavar=SEVERAL,
            help="Policies to score, with commas between: none, deepseek, flashlb, flashlb-no-tree and other ablations "
            "('all' names them), or your module:function.",
        ),
    ] = ",".join(POLICIES)
    window: Annotated[
        str,
        typer.Option(
            metavar=SEVERAL,
            help="Steps that a decision looks at, at most; beyond the interval only those with the heat of now. "
            "Several with commas.",
        ),
    ] = "512"
    interval: Annotated[
        str, typer.Option(metavar=SEVERAL, help="Steps between decisions; several with commas.")
    ] = "256"
    hindsight: Annotated[
        bool, typer.Option(help="Also fit a placement on the very steps served, and show the regret.")
    ] = True

    def jobs(self, slot_counts: list[int], settings: PlannerSettings) -> list[Job]:
        """Every policy with every combination of slots, windows and intervals; raises ``UserError``."""
        from eplb_service.replay import runner

        windows = whole_numbers("--window", self.window)
        intervals = whole_numbers("--interval", self.interval)
        setups = runner.schedules(windows, intervals, slot_counts)
        return runner.jobs_for(policies_of(self.policy), setups, settings, hindsight=self.hindsight)


@dataclass(frozen=True)
class RunOptions:
    """Where the work is done, and how it goes on after Ctrl-C."""

    SECTION: ClassVar = "How it is run"

    workers: WorkersOption = None
    ray: Annotated[
        str | None, typer.Option(help="Run on the Ray cluster at this address ('local': here).")
    ] = None
    resume: ResumeOption = None


@dataclass(frozen=True)
class OutputOptions:
    """Where the results go."""

    SECTION: ClassVar = "Results"

    out: Annotated[Path | None, typer.Option(help="Write every decision to this .json file.")] = None
    report: Annotated[Path | None, typer.Option(help="Write a report with charts to this .html file.")] = None
    charts: Annotated[Path | None, typer.Option(help="Write the charts as .svg into this folder.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False

    def check(self) -> None:
        """Raise ``OutputError`` or ``UserError`` where a result could not be written; before long work begins."""
        if self.out is not None:
            check_output(self.out, (".json",))
        if self.report is not None:
            check_output(self.report, (".html",))
        if self.charts is not None:
            check_charts(self.charts)

    def write(
        self, result: Replay, title: str, facts: dict[str, str], rests_on: Sequence[Assumption]
    ) -> None:
        """Write all that is asked for, and print the table or the document."""
        if self.report is not None:
            write_report(self.report, result, title, facts)
        if self.charts is not None:
            write_charts(self.charts, result)
        document = replay_document(result, rests_on)
        if self.out is not None:
            write_json(self.out, document)
        if self.json:
            print_json(document)
        else:
            print_replay(output_console(), result, rests_on)


@takes_planner_settings("policy")
@option_groups
def replay(
    heat: HeatOption,
    group: RankOptions,
    slots: SlotOptions,
    comparison: ComparisonOptions,
    cost: CostOptions,
    run: RunOptions,
    output: OutputOptions,
    reading: ReadingOptions,
    **planner: Any,
) -> None:
    """Run the planner along a trace and score what each decision realises in the steps after it.

    Each decision sees a window of steps and serves the next ones. All policies start from the same placement and are
    scored over the same steps, those after the first decision. Windows, intervals and slots with several values are run
    in all combinations. Ctrl-C ends the work, still prints, writes and draws what all policies have done by then, and
    leaves a state file that --resume continues from.
    """
    output.check()
    settings = planner_settings(planner)
    from eplb_service.replay.jobs import Scene, TraceFile
    from eplb_service.replay.runner import replay_file

    file = TraceFile(heat, reading.reading())
    trace = file.open()
    with naming(heat):
        check_tokens(heat, trace)
        choices = choices_per_step(trace)
    costs = cost.costs(settings, group.ranks, trace.experts, choices)
    counts = slots.counts(trace.experts, group.ranks)
    start = slots.start(trace, group.ranks)
    prior_TLE = slots.prior_heat(trace, reading.reading())
    if prior_TLE is not None:
        if len(counts) > 1:
            raise UserError("--prior places experts on one number of slots; give --slots one")
        compile_solver()
        start = _placed_for(prior_TLE, group, counts[0], trace, settings)
    if start is not None and {start.shape[2]} != set(counts):
        raise UserError(f"--placement has {start.shape[2]} slots per rank, asked for {counts}")
    scene = Scene(group.topology(trace), costs, start)
    jobs = comparison.jobs(counts, settings)
    _check_jobs(jobs, trace, scene)
    work = Resumable(run.resume)
    ledger = work.ledger(jobs, trace, scene)
    compile_solver()
    with work.kept(), replay_progress(jobs, trace.steps, ledger.decisions) as advance:
        result = replay_file(
            file, jobs, scene, workers=run.workers, ray=run.ray, on_progress=advance, ledger=ledger
        )
    rests_on = cost.assumptions(costs)
    output.write(result, f"Replay of {heat.name}", report_facts(trace, settings, costs, rests_on), rests_on)
    if result.interrupted:
        work.leave()
        raise typer.Exit(130)
    work.finish()


def _placed_for(
    prior_TLE: Counts, group: RankOptions, slots: int, trace: Trace, settings: PlannerSettings
) -> Int32:
    """Where weights are at the start for a prior's heat, int32 ``[L, R, S]``."""
    from eplb_service import offline

    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return offline.solve(prior_TLE, group.ranks, slots, topology=group.topology(trace), **options).phy2log


def _check_jobs(jobs: list[Job], trace: Trace, scene: Scene) -> None:
    """Raise what any of the jobs would raise at its beginning, before the first one is run."""
    for job in jobs:
        job.setup.schedule.decisions(trace.steps)
        scene.placement(trace, job.setup)
        if job.policy is not None and job.policy.target:
            job.policy.external()


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
