"""``eplb prove``: the gain from balancing, compared with the engine's balancer and with forced balance, on one page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eplb_core.atomic_write import check_output, write_atomically
from eplb_core.planner.settings import EVEN, SPLITS, PlannerSettings, planner_settings
from eplb_core.wire.generated import operator_pb2
from eplb_service.cli.client import Connection
from eplb_service.cli.file_options import (
    PLACEMENT,
    RankOptions,
    ReadingOptions,
    SlotOptions,
    read_start_placement,
)
from eplb_service.cli.options import RESULTS, SEVERAL, UserError, argument, one_of, option, takes_options
from eplb_service.cli.output import output_console, print_json, table_of
from eplb_service.cli.planner_options import (
    WORKERS,
    CostOptions,
    as_recorded,
    assumptions_text,
    check_groups,
    check_windows,
    one_policy,
    planner_flags,
)
from eplb_service.cli.replay import policies_of, replay_progress, report_facts, this_command
from eplb_service.cli.trace_record import record_heat
from eplb_service.cli.warmup import compile_solver
from eplb_service.io.copy_trace import check_trace_output
from eplb_service.io.native import SUFFIX
from eplb_service.io.open_trace import KNOWN
from eplb_service.telemetry.deployment_figures import figures_of

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.answers import Answers
    from eplb_service.replay.costs import Assumption
    from eplb_service.replay.policy import Job
    from eplb_service.replay.proof import Proof

_OMITTED = ("saved ms", "weights")
"""Columns of the page that are omitted on the terminal, so that the table fits in 80 columns."""
_TERMS = (
    "gain: reduction of PAR compared with off on the same steps; ABBA: the same if arms take turns; ±: half of the "
    "95 % interval; share: gain divided by forced balance's; moves: experts that ranks received."
)


@dataclass(frozen=True)
class _Shape(RankOptions):
    """Shape of the expert-parallel group. The recording of a deployment contains it."""

    ranks: int = option(0, "Ranks of the expert-parallel group; 0: as recorded.", min=0)

    def of(self, trace: Trace) -> RankOptions:
        """Return the shape, by default with the trace's number of ranks. Raises ``UserError`` if that is unknown."""
        ranks = self.ranks or trace.facts.ranks
        if not ranks:
            raise UserError("the trace does not record the number of ranks; pass it with --ranks")
        return replace(self, ranks=ranks)


@dataclass(frozen=True)
class _Watching:
    """Options for recording a live deployment."""

    SECTION: ClassVar[str] = "Recording of a live deployment"

    steps: int = option(2000, "Steps to record.", min=1)
    seconds: float | None = option(None, "Stop after this many seconds.", min=0.1)
    recording: Path | None = option(None, "Keep the recording, a .zarr folder. It is removed by default.")

    @contextmanager
    def trace(
        self, service: Connection, deployment: str, heat: Path | None
    ) -> Iterator[tuple[Path, dict[str, str], str]]:
        """Record a deployment, unless there is a trace already.

        Yields the path of the trace, facts about the recording, and the gain that the service reports. The last two are
        empty if there is no service. A recording is removed afterwards, unless the user keeps it.
        """
        if heat is not None:
            if self.recording is not None:
                raise UserError("--recording applies to a live deployment, not to --heat")
            yield heat, {}, ""
            return
        with tempfile.TemporaryDirectory() as folder:
            path = self.recording or Path(folder, "recording.zarr")
            check_trace_output(path)
            if path.suffix != SUFFIX:
                raise UserError(f"--recording is {path}; the name must end in {SUFFIX}")
            with service.open() as call:
                recording = record_heat(call, deployment, path, self.steps, self.seconds)
                response = call("GetStatus", operator_pb2.GetStatusRequest(deployment=deployment))
            kept = "not kept" if self.recording is None else f"kept; use it with --heat {path}"
            yield path, {"recording": f"{recording.summary}; {kept}"}, _gain_in_time(response.status)


@dataclass(frozen=True)
class _Arms:
    """Options that select the arms and their schedule."""

    SECTION: ClassVar[str] = "Arms and schedule"

    balancer: str = option(
        "deepseek",
        "The engine's balancer, or several separated by commas: deepseek (the algorithm that vLLM and SGLang use), an "
        "entry point of eplb.policies, or module:function.",
        metavar=SEVERAL,
    )
    engine_split: str = option(
        EVEN, f"The engine's split of tokens over replicas without our planner: {', '.join(SPLITS)}."
    )
    window: int = option(512, "Maximum number of steps that a decision uses.", min=1)
    interval: int = option(256, "Steps between decisions (the maximum for our planner).", min=1)

    def check(self) -> None:
        """Raise ``UserError`` if a balancer or the split does not exist."""
        for name in policies_of(self.balancer, "--balancer"):
            one_policy(name, "--balancer")
        one_of("--engine-split is", self.engine_split, SPLITS)
        check_windows([self.window], [self.interval])

    def jobs(self, settings: PlannerSettings, slots: int, steps: int) -> list[Job]:
        """Return the arms' jobs on a trace of ``steps`` steps. Raises ``ProofError`` if there are too few steps."""
        from eplb_service.replay.policy import Setup
        from eplb_service.replay.proof import proof_jobs

        setup = Setup(slots, self.window, self.interval)
        balancers = policies_of(self.balancer, "--balancer")
        return proof_jobs(balancers, setup, settings, self.engine_split, steps)


@dataclass(frozen=True)
class _Output:
    """Options for the output, and for the answers to compare."""

    SECTION: ClassVar[str] = RESULTS

    answers: tuple[Path, Path] | None = option(
        None,
        "Two JSON files with the token ids of each request, from one run with balancing and one without.",
        metavar="PATH PATH",
    )
    report: Path | None = option(None, "Write the page to this .html file.")
    json: bool = option(False, "Print JSON instead of text.", "--json")

    def checked_answers(self) -> Answers | None:
        """Check that the page can be written, and compare the answers.

        Raises ``OutputError``, ``UserError`` or ``AnswersError``.
        """
        if self.report is not None:
            check_output(self.report, (".html",))
        if not self.answers:
            return None
        from eplb_service.replay.answers import compare_answers

        return compare_answers(*self.answers)

    def show(self, result: _Result) -> None:
        """Write the page, and print the table or the document."""
        from eplb_service.report.proof_page import conclusions, proof_page, shape_text, text_rows

        proof = result.proof
        if self.report is not None:
            page = proof_page(
                proof,
                title=f"Proof for {result.name}",
                command=this_command(),
                facts=result.facts,
                assumptions=result.assumptions,
                answers=result.answers,
                measured=result.measured,
            )
            write_atomically(self.report, page.encode())
        lines = list(conclusions(proof, result.answers, result.measured))
        if self.json:
            parts = {name: getattr(result, name) for name in ("answers", "measured", "assumptions")}
            print_json({**_document(proof), "conclusions": lines, **parts})
            return
        console = output_console()
        console.print(shape_text(proof))
        rows = text_rows(proof)
        columns = {name: itemgetter(name) for name in rows[0] if name not in _OMITTED}
        console.print(table_of(rows, columns), soft_wrap=False)
        for line in (*lines, _TERMS, assumptions_text(result.assumptions)):
            console.print(line)


@dataclass(frozen=True)
class _Result:
    """A proof with the facts that its page states."""

    name: str
    proof: Proof
    facts: dict[str, str]
    assumptions: Sequence[Assumption]
    answers: Answers | None
    measured: str


@takes_options(*planner_flags("policy"))
def prove(
    *,
    service: Connection,
    watching: _Watching,
    group: _Shape,
    layout: SlotOptions,
    arms: _Arms,
    cost: CostOptions,
    reading: ReadingOptions,
    output: _Output,
    deployment: str = argument("", "Deployment of a running service to watch, instead of --heat."),
    heat: Path | None = option(None, f"Trace: {KNOWN}."),
    placement: Path | None = PLACEMENT,
    workers: int | None = WORKERS,
    **planner: Any,
) -> None:
    """Prove the gain from balancing, on a trace or for a live deployment.

    The same steps are served with the initial placement (off), the engine's balancer, our planner, and forced balance,
    which is only computed. For a live deployment, the command records heat and changes nothing.
    """
    from eplb_service.replay.jobs import TraceFile, check_jobs
    from eplb_service.replay.loop import Scene
    from eplb_service.replay.proof import prove as prove_file

    settings = planner_settings(planner)
    answers = output.checked_answers()
    arms.check()
    if bool(deployment) == (heat is not None):
        raise UserError("give either --heat, for a recorded trace, or the name of a deployment to watch")
    if heat is None:
        arms.jobs(settings, 1, watching.steps)
    with watching.trace(service, deployment, heat) as (path, recorded, measured):
        trace = reading.open(path)
        settings = as_recorded(settings, trace, planner)
        ranks = group.of(trace)
        scene = Scene(
            ranks.topology(trace),
            cost.costs(settings, trace, ranks.ranks),
            read_start_placement(placement, trace, ranks.ranks),
        )
        slots = _slots(layout, trace, ranks.ranks)
        check_groups(settings, trace.experts, [slots], scene.topology)
        jobs = arms.jobs(settings, slots, trace.steps)
        check_jobs(jobs, trace, scene)
        compile_solver()
        with replay_progress(jobs, trace.steps) as advance:
            file = TraceFile(path, reading.reading())
            proof = prove_file(file, scene, jobs, workers=workers, on_progress=advance)
    facts = {
        **report_facts(trace, settings),
        **recorded,
        "initial placement": str(placement or "the experts in order"),
        "schedule": f"window {arms.window}, interval {arms.interval}",
    }
    assumptions = cost.assumptions(settings, scene.costs)
    output.show(
        _Result(deployment if heat is None else heat.name, proof, facts, assumptions, answers, measured)
    )


def _slots(layout: SlotOptions, trace: Trace, ranks: int) -> int:
    """Return the number of slots per rank, by default as recorded. Raises ``UserError`` if it is unknown."""
    if layout.slots is None and layout.redundant is None and trace.facts.ranks == ranks:
        return trace.facts.slots or layout.count(trace.experts, ranks)
    return layout.count(trace.experts, ranks)


def _gain_in_time(status: operator_pb2.DeploymentStatus) -> str:
    """Return the gain that the service reports, as a sentence; empty if it reports none."""
    gains = [f"{figure.value}, {figure.note}" for figure in figures_of(status)["gain"]]
    return f"The service reports for its newest steps: {gains[0]}." if gains else ""


def _document(proof: Proof) -> dict[str, Any]:
    """Return the figures of a proof, keyed by JSON key."""
    from eplb_service.replay.proof import BLOCKS

    replay = proof.replay
    shape = {name: getattr(replay, name) for name in ("layers", "experts", "ranks", "first", "steps")}
    schedule = {name: getattr(proof.setup, name) for name in ("slots", "window", "interval")}
    return {**shape, **schedule, "blocks": BLOCKS, "arms": proof.rows()}
