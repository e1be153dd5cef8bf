"""Jobs of a replay: run in this process, in several, or on a Ray cluster, and put together."""

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
"""Called with a job's label and what it has just done."""
Numbered = Generator[tuple[int, Any], None, None]
"""Numbers of pieces of work, and what was found of each."""

_FEW_EXPERTS = 100_000
"""Experts placed, over all layers and decisions, that one process is through with in a second or two."""
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class TraceFile:
    """A trace by its place, for processes that must each open it."""

    path: Path
    read_as: ReadAs

    def open(self) -> Trace:
        """The trace; raises ``HeatError``."""
        return open_trace(self.path, self.read_as)


def jobs_for(
    policies: Sequence[str], setups: Sequence[Setup], settings: PlannerSettings, *, hindsight: bool = True
) -> list[Job]:
    """Return a job for each setup's baseline and for each policy and setup. All jobs score the same steps.

    Parameters
    ----------
    policies
        Policy names, as for ``--policy``.
    setups
        Slots and schedules, from ``setups_of``.
    settings
        Planner settings of all jobs. ``policies`` takes precedence over ``settings.policy``.
    hindsight
        If True, also score placements that are fitted to the steps that they serve.

    Returns
    -------
    list of Job
        Jobs for ``replay``.

    Raises
    ------
    ReplayError
        If a policy is unknown, or there are no policies or no setups.
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
    windows, intervals
        Steps that a decision sees, and steps between decisions.
    slots
        Slots per rank.

    Returns
    -------
    list of Setup
        Setups, ordered by slots, then windows, then intervals.

    Raises
    ------
    ReplayError
        If a number is not positive.
    """
    return [Setup(count, window, interval) for count in slots for window in windows for interval in intervals]


def scene_for(ranks: int, costs: Costs | None = None, topology: Topology | None = None) -> Scene:
    """Return the scene that all jobs share. Its first placement has the experts in order.

    Parameters
    ----------
    ranks
        Number of ranks R.
    costs
        Costs of steps and switches. By default, decisions take effect at once and no times are known.
    topology
        Nodes and token groups. By default, one node and no shared tokens.

    Returns
    -------
    Scene
        For ``replay``.
    """
    return Scene(topology or Topology.flat(ranks), costs or Costs())


def check_jobs(jobs: Sequence[Job], trace: Trace, scene: Scene) -> None:
    """Raise what any of the jobs would raise at its beginning, before the first one is run."""
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
        Heat to decide on and to serve.
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
        If the trace is damaged, or its experts do not fit the slots.
    """
    check_jobs(jobs, trace, scene)
    done = ((number, run(job, trace, scene)) for number, job in enumerate(jobs))
    return _gathered(trace, jobs, scene, done, on_progress)


def replay_file(
    file: TraceFile,
    jobs: Sequence[Job],
    scene: Scene,
    *,
    workers: int | None = None,
    ray: str | None = None,
    on_progress: OnProgress | None = None,
) -> Replay:
    """``replay`` on ``workers`` processes (all cores by default), or on a Ray cluster; the results are the same.

    Ctrl-C ends the work, and the policies that are done by then come back as an interrupted ``Replay``; where there are
    none, ``KeyboardInterrupt`` passes through.

    Parameters
    ----------
    file
        The trace; each node of a Ray cluster must see it.
    jobs
        What is to be replayed: policies and baselines.
    scene
        What all jobs share.
    workers
        Processes; as many as are worth it where not given.
    ray
        Address of a Ray cluster in place of processes; ``local``: one on this machine.
    on_progress
        Called with what each job has done; job by job where other processes do the work.
    """
    trace = file.open()
    workers = min(workers or _worthwhile(jobs, trace), len(jobs))
    jobs = sparing(jobs, workers)
    if workers == 1 and ray is None:
        with naming(file.path):
            return replay(trace, jobs, scene, on_progress)
    done = completed(_run_file, [(file, scene, job) for job in jobs], workers, ray)
    return _gathered(trace, jobs, scene, done, on_progress)


def _run_file(file: TraceFile, scene: Scene, job: Job) -> list[ReplayedDecision]:
    """Run a job on a trace that is opened first; errors name its path."""
    trace = file.open()
    with naming(file.path):
        return list(run(job, trace, scene))


def _gathered(
    trace: Trace, jobs: Sequence[Job], scene: Scene, done: Numbered, on_progress: OnProgress | None
) -> Replay:
    """Put together what the jobs found, in their order; where it is stopped, what is whole by then."""
    found: dict[int, PolicyReplay] = {}
    interrupted = False
    with closing(done):
        try:
            for number, rows in done:
                job, made = jobs[number], []
                for row in rows:
                    made.append(row)
                    if on_progress is not None:
                        on_progress(job.label, row)
                found[number] = PolicyReplay(job.policy, job.label, job.setup, tuple(made))
        except KeyboardInterrupt:
            interrupted = True
    whole = [found[number] for number in sorted(found)]
    measured = {one.setup for one in whole if not one.policy}
    policies = tuple(one for one in whole if one.policy and one.setup in measured)
    if not policies:
        raise KeyboardInterrupt
    return Replay(
        first=jobs[0].setup.first,
        steps=policies[0].steps,
        ranks=scene.topology.ranks,
        layers=trace.layers,
        experts=trace.experts,
        policies=policies,
        baselines=tuple(one for one in whole if not one.policy),
        costs=scene.costs,
        interrupted=interrupted,
    )


def _worthwhile(jobs: Sequence[Job], trace: Trace) -> int:
    """Processes that a replay is worth: one where it is done before others would have started."""
    decisions = sum(len(job.setup.decisions(trace.steps)) for job in jobs)
    return cores() if decisions * trace.layers * trace.experts > _FEW_EXPERTS else 1


def sparing(jobs: Iterable[Job], workers: int) -> list[Job]:
    """Jobs with a fair part of the cores to solve on, where their settings name no number of threads."""
    threads = max(1, cores() // workers)
    return [
        replace(job, settings=replace(job.settings, threads=job.settings.threads or threads)) for job in jobs
    ]


def _label(setup: Setup, setups: Sequence[Setup]) -> str:
    """End of a label: how a setup differs from the others."""
    texts = {"slots": ", {} slots", "window": ", window {}", "interval": ", interval {}"}
    differ = [name for name in texts if len({getattr(other, name) for other in setups}) > 1]
    return "".join(texts[name].format(getattr(setup, name)) for name in differ)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def completed(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], workers: int, ray: str | None = None
) -> Numbered:
    """Run ``function`` on each piece of the work, and yield its number and what was returned as they are done.

    Raises what it raises, and ``ReplayError`` where a process or node dies. Closing the iterator ends the work.

    Parameters
    ----------
    function, work
        What is to be done, and the arguments of each call.
    workers
        Processes; with one the work is done in this process.
    ray
        Address of a Ray cluster in place of processes.
    """
    if ray is not None:
        yield from _on_ray(function, work, ray)
    elif workers > 1:
        yield from _in_processes(function, work, workers)
    else:
        for number, arguments in enumerate(work):
            yield number, function(*arguments)


def _in_processes(function: Callable[..., Any], work: Sequence[tuple[Any, ...]], workers: int) -> Numbered:
    others = multiprocessing.active_children()
    # Ctrl-C is for the process that shares out the work.
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    numbers = {pool.submit(function, *arguments): number for number, arguments in enumerate(work)}
    try:
        for done in as_completed(numbers):
            yield numbers[done], done.result()
    except BrokenProcessPool as error:
        raise ReplayError(
            "a worker process ended unexpectedly; if it was killed for memory, use fewer --workers"
        ) from error
    finally:
        if not all(done.done() for done in numbers):
            for process in set(multiprocessing.active_children()).difference(others):
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
        numbers = {task.remote(*arguments): number for number, arguments in enumerate(work)}
        while numbers:
            ended, _ = ray.wait(list(numbers), num_returns=1)
            yield numbers.pop(ended[0]), ray.get(ended[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ReplayError(f"a Ray node failed ({' '.join(str(error).split())})") from error
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ``ReplayError`` where nobody listens at ``host:port``; Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ReplayError(f"no Ray cluster at {address} ({error})") from error
