"""Runs policies along a trace as the service would, and puts what they found together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from eplb_service.io.trace import Trace
from eplb_service.planner.settings import STEP, TABLES, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.baseline import BaselineRow
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import Job, JobProgress, Ledger, Scene, TraceFile, run, run_file
from eplb_service.replay.policy import Policy
from eplb_service.replay.policy_replay import PolicyReplay, ReplayedDecision, Setup
from eplb_service.replay.result import BaselineReplay, Replay
from eplb_service.replay.schedule import ReplayError, Schedule
from eplb_service.replay.workers import cores, run_in_processes, run_on_ray

_FEW_EXPERTS = 100_000
"""Experts placed, over all layers and decisions, that one process is through with in a second or two."""

UNSPLIT = "flashlb by tables"
"""What a stepwise split is compared with."""

OnProgress = Callable[[str, JobProgress], object]
"""Called with a job's label and what it has just done."""


def jobs_for(
    policies: Sequence[str], setups: Sequence[Setup], settings: PlannerSettings, *, hindsight: bool = True
) -> list[Job]:
    """A baseline for each setup, and every policy with each; all score the same steps.

    Where steps are split under a cost curve, flashlb without the split is among them: by tables and planned for time.
    Raises ``ReplayError`` on an unknown policy, or nothing to do.
    """
    if not policies or not setups:
        raise ReplayError("a replay needs at least one policy and one setup")
    start = max(setup.schedule.first for setup in setups)
    shifted = [replace(setup, schedule=replace(setup.schedule, start=start)) for setup in setups]
    fitting = replace(settings, policy="flashlb") if hindsight else None
    jobs = []
    for setup in shifted:
        label = _label(setup, shifted)
        jobs.append(Job(f"baseline{label}", setup, None, fitting, settings.split, settings.deal_width))
        jobs += [
            Job(
                f"{name}{label}",
                setup,
                Policy.of(name, settings),
                split=settings.split,
                deal_width=settings.deal_width,
            )
            for name in policies
        ]
        if settings.split == STEP and settings.cost_curve is not None:
            jobs.append(unsplit_job(f"{UNSPLIT}{label}", setup, settings))
    return jobs


def unsplit_job(label: str, setup: Setup, settings: PlannerSettings) -> Job:
    """flashlb on a host that sends tokens by tables, otherwise as the settings say."""
    return Job(label, setup, Policy.of("flashlb", replace(settings, split=TABLES)))


def replay(
    trace: Trace,
    jobs: Sequence[Job],
    scene: Scene,
    on_progress: OnProgress | None = None,
) -> Replay:
    """Run ``jobs`` on an open trace in this process.

    A trace without sources does not know where tokens come from: an expert's tokens are then split evenly over the
    ranks. Raises ``ReplayError`` where the trace is too short or a policy fails, and what planner and trace raise.
    """
    return _gathered(trace, Ledger(jobs), scene, run(jobs, trace, scene), on_progress)


def replay_file(
    file: TraceFile,
    jobs: Sequence[Job],
    scene: Scene,
    *,
    workers: int | None = None,
    ray: str | None = None,
    on_progress: OnProgress | None = None,
    ledger: Ledger | None = None,
) -> Replay:
    """``replay`` on ``workers`` processes (all cores by default), or on a Ray cluster; the results are the same.

    Ctrl-C
    ends the work, and what all jobs have done by then comes back as an interrupted ``Replay``; where that is nothing,
    ``KeyboardInterrupt`` passes through.

    Parameters
    ----------
    file
        The trace.
    jobs
        What is to be replayed: policies and baselines.
    scene
        What all jobs share.
    workers
        Processes; as many as are worth it where not given.
    ray
        Address of a Ray cluster in place of processes.
    on_progress
        Called with what each job has done so far.
    ledger
        What was found by an interrupted run is not done again; it holds all that was found in the end.
    """
    trace = file.open()
    workers = min(workers or _worthwhile(jobs, trace), len(jobs))
    threads = max(1, cores() // workers)
    jobs = [with_threads(job, threads) for job in jobs]
    ledger = ledger or Ledger(jobs)
    if ray is not None:
        steps = run_on_ray(jobs, file, scene, ledger.done(), ray)
    elif workers == 1:
        steps = run_file(jobs, file, scene, ledger.done())
    else:
        steps = run_in_processes(jobs, file, scene, ledger.done(), workers)
    return _gathered(trace, ledger, scene, steps, on_progress)


def _gathered(
    trace: Trace,
    ledger: Ledger,
    scene: Scene,
    steps: Iterator[tuple[int, JobProgress]],
    on_progress: OnProgress | None,
) -> Replay:
    jobs: Sequence[Job] = ledger.jobs
    for job in jobs:
        job.setup.schedule.decisions(trace.steps)
        scene.placement(trace, job.setup)
    interrupted = False
    try:
        for number, progress in steps:
            ledger.add(number, progress)
            if on_progress is not None:
                on_progress(jobs[number].label, progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        steps.close()  # type: ignore[attr-defined]
    reported = ledger.reported
    if interrupted:
        jobs, reported = _common(jobs, reported)
    return _put_together(trace, jobs, scene, reported, interrupted)


def _common(
    jobs: Sequence[Job], reported: list[list[JobProgress]]
) -> tuple[list[Job], list[list[JobProgress]]]:
    """Of work that was stopped: the setups whose baseline was begun, and the decisions that all of them share."""
    begun = [number for number, done in enumerate(reported) if done]
    measured = {jobs[number].setup for number in begun if jobs[number].policy is None}
    kept = [number for number in begun if jobs[number].setup in measured]
    if not any(jobs[number].policy for number in kept):
        raise KeyboardInterrupt
    cut = {}
    for setup in measured:
        lengths = [len(reported[number]) for number in kept if jobs[number].setup == setup]
        cut[setup] = min(lengths)
    return [jobs[n] for n in kept], [reported[n][: cut[jobs[n].setup]] for n in kept]


def _put_together(
    trace: Trace, jobs: Sequence[Job], scene: Scene, reported: list[list[JobProgress]], interrupted: bool
) -> Replay:
    policies, baselines = [], []
    for job, done in zip(jobs, reported, strict=True):
        if job.policy is None:
            rows = [progress.made for progress in done if isinstance(progress.made, BaselineRow)]
            hindsight = [mark.hindsight_L for mark in rows if mark.hindsight_L is not None]
            us = [mark.left_alone_us_L for mark in rows if mark.left_alone_us_L is not None]
            baselines.append(
                BaselineReplay(
                    job.setup,
                    np.stack([mark.left_alone_L for mark in rows]),
                    np.stack([mark.floor_L for mark in rows]),
                    np.stack(hindsight) if hindsight else None,
                    done[-1].loads_LR,
                    np.stack(us) if us else None,
                )
            )
        else:
            decisions = tuple(
                progress.made for progress in done if isinstance(progress.made, ReplayedDecision)
            )
            policies.append(PolicyReplay(job.policy.name, job.label, job.setup, decisions, done[-1].loads_LR))
    return Replay(
        first=jobs[0].setup.schedule.first,
        steps=max(policy.steps for policy in policies),
        ranks=scene.topology.ranks,
        layers=trace.layers,
        experts=trace.experts,
        policies=tuple(policies),
        baselines=tuple(baselines),
        costs=scene.costs,
        interrupted=interrupted,
    )


def _worthwhile(jobs: Sequence[Job], trace: Trace) -> int:
    """Processes that a replay is worth: one where it is done before others would have started."""
    decisions = sum(len(job.setup.schedule.decisions(trace.steps)) for job in jobs)
    return cores() if decisions * trace.layers * trace.experts > _FEW_EXPERTS else 1


def with_threads(job: Job, threads: int) -> Job:
    """The job with so many threads to solve on, where its settings name no number."""
    policy = job.policy
    if policy is not None:
        settings = policy.settings
        policy = replace(policy, settings=replace(settings, threads=settings.threads or threads))
    hindsight = job.hindsight
    if hindsight is not None:
        hindsight = replace(hindsight, threads=hindsight.threads or threads)
    return replace(job, policy=policy, hindsight=hindsight)


def _label(setup: Setup, setups: Sequence[Setup]) -> str:
    """How a setup differs from the others, as the end of a label."""
    parts = []
    if len({other.slots for other in setups}) > 1:
        parts.append(f"{setup.slots} slots")
    if len({other.schedule.window for other in setups}) > 1:
        parts.append(f"window {setup.schedule.window}")
    if len({other.schedule.interval for other in setups}) > 1:
        parts.append(f"interval {setup.schedule.interval}")
    return "".join(f", {part}" for part in parts)


def scene_for(ranks: int, costs: Costs | None = None, topology: Topology | None = None) -> Scene:
    """A scene of experts in order on ``ranks`` ranks, one node unless ``topology`` says otherwise."""
    return Scene(topology or Topology.flat(ranks), costs or Costs())


def schedules(windows: Sequence[int], intervals: Sequence[int], slots: Sequence[int]) -> list[Setup]:
    """Every combination of windows, intervals and slots; raises ``ReplayError`` on one that cannot be."""
    return [
        Setup(slot_count, Schedule(window, interval))
        for slot_count in slots
        for window in windows
        for interval in intervals
    ]
