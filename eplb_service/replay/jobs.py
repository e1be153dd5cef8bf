"""Create a replay's jobs, run them in one or several processes or on a Ray cluster, and collect their results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eplb_core.extras import install_command
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.trace import Trace
from eplb_service.replay.costs import Costs
from eplb_service.replay.loop import Scene, run
from eplb_service.replay.policy import Job, ReplayError, Setup
from eplb_service.replay.result import PolicyReplay, Replay, ReplayedDecision

OnProgress = Callable[[str, ReplayedDecision], object]
"""Callback with the label of a job and its newest decision."""
Numbered = Generator[tuple[int, Any], None, None]
"""Index and result of each task, in completion order."""

_SMALL_REPLAY = 100_000
"""Maximum amount of work in a small replay, in experts placed over all layers and decisions. One process finishes it in
a second or two, before additional processes could start."""
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class TraceFile:
    """Path of a trace and facts needed to read it. Each process opens the trace itself.

    Parameters
    ----------
    path
        Path of the trace.
    read_as
        Facts that the file does not state.
    """

    path: Path
    read_as: ReadAs

    def open(self) -> Trace:
        """Open the trace. Raises ``HeatError`` if it cannot be read."""
        return open_trace(self.path, self.read_as)


def jobs_for(
    policies: Sequence[str], setups: Sequence[Setup], settings: PlannerSettings, *, hindsight: bool = True
) -> list[Job]:
    """Return a job for each setup's baseline and for each policy and setup. All jobs are scored on the same steps.

    Parameters
    ----------
    policies
        Policy names, as for ``--policy``.
    setups
        Slots and schedules, from ``setups_of``.
    settings
        Planner settings of all jobs. ``policies`` takes precedence over ``settings.policy``.
    hindsight
        If True, also score placements that are fitted to the very steps that they serve.

    Returns
    -------
    list of Job
        Jobs for ``replay``.

    Raises
    ------
    ReplayError
        If a policy is unknown, or there are no policies or no setups.

    Examples
    --------
    >>> setups = setups_of(windows=[256], intervals=[128], slots=[4, 5])
    >>> [job.label for job in jobs_for(["deepseek"], setups, PlannerSettings())]
    ['baseline, 4 slots', 'deepseek, 4 slots', 'baseline, 5 slots', 'deepseek, 5 slots']
    """
    if not policies or not setups:
        raise ReplayError("a replay needs at least one policy and one setup")
    start = max(setup.first for setup in setups)
    flashlb = replace(settings, policy="flashlb")
    jobs = []
    for setup in (replace(setup, start=start) for setup in setups):
        label = _label(setup, setups)
        jobs.append(Job(f"baseline{label}", setup, "", flashlb, hindsight=hindsight))
        jobs += [Job.of(f"{name}{label}", setup, name, settings) for name in policies]
    return jobs


def setups_of(windows: Sequence[int], intervals: Sequence[int], slots: Sequence[int]) -> list[Setup]:
    """Return every combination of windows, intervals and slots.

    Parameters
    ----------
    windows
        Window lengths: the maximum number of steps that a decision uses.
    intervals
        Intervals: the number of steps between decisions.
    slots
        Slots per rank.

    Returns
    -------
    list of Setup
        Setups, ordered by slots, then windows, then intervals.

    Raises
    ------
    ReplayError
        If any number is not positive.

    Examples
    --------
    >>> [(setup.slots, setup.window) for setup in setups_of(windows=[128, 256], intervals=[64], slots=[4, 5])]
    [(4, 128), (4, 256), (5, 128), (5, 256)]
    """
    return [Setup(count, window, interval) for count in slots for window in windows for interval in intervals]


def scene_for(ranks: int, costs: Costs | None = None, topology: Topology | None = None) -> Scene:
    """Return the scene that all jobs share. In its initial placement, experts are in order.

    Parameters
    ----------
    ranks
        R, number of ranks.
    costs
        Costs of steps and switches. By default, decisions take effect immediately, and times are unknown.
    topology
        Nodes and token groups. By default, one node, with different tokens on every rank.

    Returns
    -------
    Scene
        Scene for ``replay``.
    """
    return Scene(topology or Topology.flat(ranks), costs or Costs())


def check_jobs(jobs: Sequence[Job], trace: Trace, scene: Scene) -> None:
    """Check that every job can start before any of them runs. Raise the error of the first one that cannot."""
    for job in jobs:
        job.setup.decisions(trace.steps)
        scene.placement(trace, job.setup.slots)
        job.external()


def replay(trace: Trace, jobs: Sequence[Job], scene: Scene, on_progress: OnProgress | None = None) -> Replay:
    """Run ``jobs`` on an open trace in this process.

    If the trace does not record source ranks, each token's source is drawn uniformly from all ranks.

    Parameters
    ----------
    trace
        Trace that provides the steps to serve and the heat for decisions.
    jobs
        Policies and baselines, from ``jobs_for``.
    scene
        Ranks and costs, from ``scene_for``.
    on_progress
        Callback for each decision, with the job's label.

    Returns
    -------
    Replay
        Results of the policies and their baselines.

    Raises
    ------
    ReplayError
        If the trace is too short, or a policy fails.
    HeatError, PlacementError
        If the trace is damaged, or its experts do not fit in the slots.

    Examples
    --------
    Expert 3 is hot. After the first window of eight steps, DeepSeek's policy gives it a second replica:

    >>> from eplb_service.io.trace import ArrayTrace
    >>> import numpy as np
    >>> heat_TLE = np.tile(np.array([[[1000, 1000, 2000, 8000]]]), (24, 1, 1))
    >>> jobs = jobs_for(["none", "deepseek"], [Setup(slots=3, window=8, interval=8)], PlannerSettings(split="even"))
    >>> result = replay(ArrayTrace(heat_TLE), jobs, scene_for(ranks=2))
    >>> [(policy.label, round(policy.par_realised, 2), policy.moves) for policy in result.policies]
    [('none', 1.5, 0), ('deepseek', 1.01, 2)]
    """
    check_jobs(jobs, trace, scene)
    completed_jobs = ((index, run(job, trace, scene)) for index, job in enumerate(jobs))
    return _collect(trace, jobs, scene, completed_jobs, on_progress)


def replay_file(
    file: TraceFile,
    jobs: Sequence[Job],
    scene: Scene,
    *,
    workers: int | None = None,
    ray: str | None = None,
    on_progress: OnProgress | None = None,
) -> Replay:
    """Run jobs in several processes or on a Ray cluster, with the same results as ``replay``.

    Ctrl-C stops the work. The results of the policies that have already finished are returned as an interrupted
    ``Replay``. If no policy has finished, ``KeyboardInterrupt`` is raised.

    Parameters
    ----------
    file
        The trace. Every node of a Ray cluster must have access to it.
    jobs
        Policies and baselines, from ``jobs_for``.
    scene
        Ranks and costs, from ``scene_for``.
    workers
        Number of processes; by default one per core, or a single one for a small replay.
    ray
        Address of a Ray cluster to use instead of processes; ``local`` to start one on this machine.
    on_progress
        Callback for each decision, with the job's label. With several processes, the calls for a job are made after the
        job has finished.
    """
    trace = file.open()
    workers = min(workers or _default_workers(jobs, trace), len(jobs))
    jobs = sparing(jobs, workers)
    if workers == 1 and ray is None:
        with naming(file.path):
            return replay(trace, jobs, scene, on_progress)
    completed_jobs = completed(_run_file, [(file, scene, job) for job in jobs], workers, ray)
    return _collect(trace, jobs, scene, completed_jobs, on_progress)


def _run_file(file: TraceFile, scene: Scene, job: Job) -> list[ReplayedDecision]:
    """Open the trace and run a job on it. Error messages name the trace."""
    trace = file.open()
    with naming(file.path):
        return list(run(job, trace, scene))


def _collect(
    trace: Trace,
    jobs: Sequence[Job],
    scene: Scene,
    completed_jobs: Numbered,
    on_progress: OnProgress | None,
) -> Replay:
    """Collect the results in job order. If the work is interrupted, return the results of the finished policies."""
    result_of_job: dict[int, PolicyReplay] = {}
    interrupted = False
    with closing(completed_jobs):
        try:
            for index, job_decisions in completed_jobs:
                job = jobs[index]
                decisions = []
                for decision in job_decisions:
                    decisions.append(decision)
                    if on_progress is not None:
                        on_progress(job.label, decision)
                result_of_job[index] = PolicyReplay(job.policy, job.label, job.setup, tuple(decisions))
        except KeyboardInterrupt:
            interrupted = True
    results = [result_of_job[index] for index in sorted(result_of_job)]
    baselines = tuple(result for result in results if not result.policy)
    scored_setups = {baseline.setup for baseline in baselines}
    policies = tuple(result for result in results if result.policy and result.setup in scored_setups)
    if not policies:
        raise KeyboardInterrupt
    return Replay(
        first=jobs[0].setup.first,
        steps=policies[0].steps,
        ranks=scene.topology.ranks,
        layers=trace.layers,
        experts=trace.experts,
        policies=policies,
        baselines=baselines,
        costs=scene.costs,
        interrupted=interrupted,
    )


def _default_workers(jobs: Sequence[Job], trace: Trace) -> int:
    """Return the number of cores, or 1 for a replay that finishes before additional processes could start."""
    decisions = sum(len(job.setup.decisions(trace.steps)) for job in jobs)
    return cores() if decisions * trace.layers * trace.experts > _SMALL_REPLAY else 1


def sparing(jobs: Iterable[Job], workers: int) -> list[Job]:
    """Limit each job's solver threads to its share of the cores, unless its settings specify a number of threads."""
    threads = max(1, cores() // workers)
    return [
        replace(job, settings=replace(job.settings, threads=job.settings.threads or threads)) for job in jobs
    ]


def _label(setup: Setup, setups: Sequence[Setup]) -> str:
    """Return the label suffix for a setup: the values in which the setups differ."""
    texts = {"slots": ", {} slots", "window": ", window {}", "interval": ", interval {}"}
    varied = [name for name in texts if len({getattr(each, name) for each in setups}) > 1]
    return "".join(texts[name].format(getattr(setup, name)) for name in varied)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def completed(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], workers: int, ray: str | None = None
) -> Numbered:
    """Run a function once per task, in this process, in several processes, or on a Ray cluster.

    Closing the iterator stops the work.

    Parameters
    ----------
    function
        Function to run.
    work
        Arguments of each call.
    workers
        Number of processes; 1 to run in this process.
    ray
        Address of a Ray cluster to use instead of processes.

    Yields
    ------
    tuple of int and Any
        Index of a task and its result, in completion order.

    Raises
    ------
    ReplayError
        If a process or a node fails. Exceptions from the function are raised as well.

    Examples
    --------
    >>> list(completed(pow, [(2, 3), (5, 2)], workers=1))
    [(0, 8), (1, 25)]
    """
    if ray is not None:
        yield from _on_ray(function, work, ray)
    elif workers > 1:
        yield from _in_processes(function, work, workers)
    else:
        for index, arguments in enumerate(work):
            yield index, function(*arguments)


def _in_processes(function: Callable[..., Any], work: Sequence[tuple[Any, ...]], workers: int) -> Numbered:
    children_before = multiprocessing.active_children()
    # Workers ignore Ctrl-C; only this process handles it.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    index_of_future = {pool.submit(function, *arguments): index for index, arguments in enumerate(work)}
    try:
        for future in as_completed(index_of_future):
            yield index_of_future[future], future.result()
    except BrokenProcessPool as error:
        raise ReplayError(
            "a worker process exited unexpectedly; if it ran out of memory, use fewer --workers"
        ) from error
    finally:
        if not all(future.done() for future in index_of_future):
            for process in set(multiprocessing.active_children()).difference(children_before):
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _on_ray(function: Callable[..., Any], work: Sequence[tuple[Any, ...]], address: str) -> Numbered:
    try:
        import ray
    except ImportError as error:
        raise ReplayError(f"--ray needs Ray: {install_command('ray')}") from error
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ReplayError(f"no Ray cluster at {address} ({' '.join(str(error).split())})") from error
    try:
        task = ray.remote(max_retries=1)(function)
        index_of_task = {task.remote(*arguments): index for index, arguments in enumerate(work)}
        while index_of_task:
            ended, _ = ray.wait(list(index_of_task), num_returns=1)
            yield index_of_task.pop(ended[0]), ray.get(ended[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ReplayError(f"a Ray node failed ({' '.join(str(error).split())})") from error
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ``ReplayError`` if no server accepts connections at ``host:port``. Ray itself would block for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ReplayError(f"no Ray cluster at {address} ({error})") from error
