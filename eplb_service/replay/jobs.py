"""Jobs of a replay: run in this process, in several, or on a Ray cluster, and put together."""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.open_trace import naming, open_trace
from eplb_service.io.trace import Trace
from eplb_service.planner.settings import STEP, TABLES, PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Costs
from eplb_service.replay.loop import MEMORY, Scene, SlidingHeat, run_of
from eplb_service.replay.policy import Job, ReplayError, Setup
from eplb_service.replay.result import PolicyReplay, Replay, ReplayedDecision

UNSPLIT = "flashlb by tables"
"""Policy that a stepwise split is compared with."""
OnProgress = Callable[[str, ReplayedDecision], object]
"""Called with a job's label and what it has just done."""
_Progress = Iterator[tuple[int, ReplayedDecision]]
"""Numbers of jobs, and what each has just done."""

_FEW_EXPERTS = 100_000
"""Experts placed, over all layers and decisions, that one process is through with in a second or two."""
_EFFORT = {"": 1, "none": 1, "deepseek": 8, "flashlb": 24}
"""About how long a decision takes beside one that does nothing, for sharing out jobs alike; any other policy as long as
flashlb, and hindsight longer, because it places every layer from scratch."""
_HINDSIGHT = 32
"""As ``_EFFORT``, for a baseline with hindsight."""
_CONTEXT = multiprocessing.get_context("spawn")
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
    """A baseline for each setup, and every policy with each; all score the same steps.

    Where steps are split under a cost curve, flashlb without the split is among them: by tables and planned for time.
    Raises ``ReplayError`` on an unknown policy, or nothing to do.
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
        if settings.split == STEP and settings.cost_curve is not None:
            jobs.append(unsplit_job(f"{UNSPLIT}{label}", setup, settings))
    return jobs


def unsplit_job(label: str, setup: Setup, settings: PlannerSettings) -> Job:
    """Job of flashlb on a host that sends tokens by tables, otherwise as the settings say."""
    return Job.of(label, setup, "flashlb", replace(settings, split=TABLES))


def setups_of(windows: Sequence[int], intervals: Sequence[int], slots: Sequence[int]) -> list[Setup]:
    """Every combination of windows, intervals and slots; raises ``ReplayError`` on one that cannot be."""
    return [Setup(count, window, interval) for count in slots for window in windows for interval in intervals]


def scene_for(ranks: int, costs: Costs | None = None, topology: Topology | None = None) -> Scene:
    """A scene of experts in order on ``ranks`` ranks, one node unless ``topology`` says otherwise."""
    return Scene(topology or Topology.flat(ranks), costs or Costs())


def check_jobs(jobs: Sequence[Job], trace: Trace, scene: Scene) -> None:
    """Raise what any of the jobs would raise at its beginning, before the first one is run."""
    for job in jobs:
        job.setup.decisions(trace.steps)
        scene.placement(trace, job.setup.slots)
        job.external()


def replay(trace: Trace, jobs: Sequence[Job], scene: Scene, on_progress: OnProgress | None = None) -> Replay:
    """Run ``jobs`` on an open trace in this process.

    A trace without sources does not know where tokens come from: an expert's tokens are then split evenly over the
    ranks. Raises ``ReplayError`` where the trace is too short or a policy fails, and what planner and trace raise.
    """
    return _gathered(trace, jobs, scene, _run(jobs, trace, scene), on_progress)


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

    Ctrl-C ends the work, and what all jobs have done by then comes back as an interrupted ``Replay``; where that is
    nothing, ``KeyboardInterrupt`` passes through.

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
        Called with what each job has done so far.
    """
    trace = file.open()
    workers = min(workers or _worthwhile(jobs, trace), len(jobs))
    jobs = [with_threads(job, max(1, cores() // workers)) for job in jobs]
    numbered = list(enumerate(jobs))
    if ray is not None:
        done = on_ray(_whole, [(file, scene, job) for job in jobs], ray)
        steps: _Progress = ((number, made) for number, decisions in done for made in decisions)
    elif workers == 1:
        steps = _run_file(file, scene, numbered)
    else:
        shares = shared_out(numbered, workers, lambda entry: _effort(entry[1]))
        steps = in_processes(_run_file, [(file, scene, share) for share in shares])
    return _gathered(trace, jobs, scene, steps, on_progress)


def _run(jobs: Sequence[Job], trace: Trace, scene: Scene) -> _Progress:
    """Make all jobs' decisions in the order of the steps before which they fall, so that the trace is read once."""
    slack = max((max(job.setup.window, MEMORY if job.on_change else 0) for job in jobs), default=0)
    heat = SlidingHeat(trace, slack)
    runs = [run_of(job, trace, heat, scene) for job in jobs]
    steps = [job.setup.decisions(trace.steps) for job in jobs]
    due = [(ahead[0], number) for number, ahead in enumerate(steps)]
    heapq.heapify(due)
    while due:
        step, number = due[0]
        yield number, runs[number].decide(step)
        following = step + jobs[number].setup.interval
        if following in steps[number]:
            heapq.heapreplace(due, (following, number))
        else:
            heapq.heappop(due)


def _run_file(file: TraceFile, scene: Scene, numbered: Sequence[tuple[int, Job]]) -> _Progress:
    """``_run`` of a share of the jobs on a trace that is opened first; errors name its path."""
    numbers, jobs = zip(*numbered, strict=True)
    with naming(file.path):
        for number, made in _run(jobs, file.open(), scene):
            yield numbers[number], made


def _whole(file: TraceFile, scene: Scene, job: Job) -> list[ReplayedDecision]:
    return [made for _, made in _run_file(file, scene, [(0, job)])]


def _gathered(
    trace: Trace, jobs: Sequence[Job], scene: Scene, steps: _Progress, on_progress: OnProgress | None
) -> Replay:
    check_jobs(jobs, trace, scene)
    done: list[list[ReplayedDecision]] = [[] for _ in jobs]
    interrupted = False
    try:
        for number, made in steps:
            if done[number]:
                done[number][-1] = replace(done[number][-1], loads_LR=None)
            done[number].append(made)
            if on_progress is not None:
                on_progress(jobs[number].label, made)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        steps.close()  # type: ignore[attr-defined]
    if interrupted:
        jobs, done = _common(jobs, done)
    found = [
        PolicyReplay(job.policy, job.label, job.setup, tuple(made))
        for job, made in zip(jobs, done, strict=True)
    ]
    policies = tuple(one for one in found if one.policy)
    return Replay(
        first=jobs[0].setup.first,
        steps=max(policy.steps for policy in policies),
        ranks=scene.topology.ranks,
        layers=trace.layers,
        experts=trace.experts,
        policies=policies,
        baselines=tuple(one for one in found if not one.policy),
        costs=scene.costs,
        interrupted=interrupted,
    )


def _common(
    jobs: Sequence[Job], done: list[list[ReplayedDecision]]
) -> tuple[list[Job], list[list[ReplayedDecision]]]:
    """Setups of stopped work whose baseline was begun, and the decisions that all jobs of each share."""
    begun = [number for number, made in enumerate(done) if made]
    measured = {jobs[number].setup for number in begun if not jobs[number].policy}
    kept = [number for number in begun if jobs[number].setup in measured]
    if not any(jobs[number].policy for number in kept):
        raise KeyboardInterrupt
    cut = {
        setup: min(len(done[number]) for number in kept if jobs[number].setup == setup) for setup in measured
    }
    last = [done[number][-1].loads_LR for number in kept]
    shared = [done[number][: cut[jobs[number].setup]] for number in kept]
    for made, loads_LR in zip(shared, last, strict=True):
        made[-1] = replace(made[-1], loads_LR=loads_LR)
    return [jobs[number] for number in kept], shared


def _worthwhile(jobs: Sequence[Job], trace: Trace) -> int:
    """Processes that a replay is worth: one where it is done before others would have started."""
    decisions = sum(len(job.setup.decisions(trace.steps)) for job in jobs)
    return cores() if decisions * trace.layers * trace.experts > _FEW_EXPERTS else 1


def _effort(job: Job) -> float:
    decision = _HINDSIGHT if job.hindsight else _EFFORT.get(job.policy, _EFFORT["flashlb"])
    return decision / job.setup.interval


def with_threads(job: Job, threads: int) -> Job:
    """Job with so many threads to solve on, where its settings name no number."""
    return replace(job, settings=replace(job.settings, threads=job.settings.threads or threads))


def _label(setup: Setup, setups: Sequence[Setup]) -> str:
    """End of a label: how a setup differs from the others."""
    parts = []
    for name, text in (("slots", "{} slots"), ("window", "window {}"), ("interval", "interval {}")):
        if len({getattr(other, name) for other in setups}) > 1:
            parts.append(text.format(getattr(setup, name)))
    return "".join(f", {part}" for part in parts)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared_out(work: Iterable[Any], workers: int, effort: Callable[[Any], float]) -> list[list[Any]]:
    """Shares of about the same effort, none of them empty: the longest first, each to who has least."""
    work = sorted(work, key=lambda piece: -effort(piece))
    shares: list[list[Any]] = [[] for _ in range(min(workers, len(work)))]
    efforts = [0.0] * len(shares)
    for piece in work:
        least = efforts.index(min(efforts))
        shares[least].append(piece)
        efforts[least] += effort(piece)
    return shares


def in_processes(
    function: Callable[..., Iterable[tuple[int, Any]]], shares: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Any]]:
    """Run ``function`` on each share of the work, which has a process of its own, and yield what it yields.

    Raises what it raises, and ``ReplayError`` where a process dies. Closing the iterator ends the processes.
    """
    crew = [_Worker(function, share) for share in shares]
    busy = {worker.pipe: worker for worker in crew}
    try:
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                message = worker.receive()
                if message is None:
                    del busy[worker.pipe]
                else:
                    yield message
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """One process with its share of the work, and the pipe from it."""

    def __init__(self, function: Callable[..., Iterable[tuple[int, Any]]], share: tuple[Any, ...]) -> None:
        self.pipe, theirs = _CONTEXT.Pipe(duplex=False)
        arguments = (theirs, function, share)
        self._process: SpawnProcess = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Its next message, or ``None`` at the end; raises what it raised."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(timeout=5)
            raise ReplayError(
                f"a worker process ended unexpectedly (exit code {self._process.exitcode}); "
                "if it was killed for memory, use fewer --workers"
            ) from error
        if isinstance(message, BaseException):
            raise message
        return message

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join(timeout=5)


def _work(
    pipe: Connection, function: Callable[..., Iterable[tuple[int, Any]]], share: tuple[Any, ...]
) -> None:
    """A worker process: what comes of its share, until that is done or nobody listens."""
    # Ctrl-C is for the process that shared out the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        try:
            for message in function(*share):
                pipe.send(message)
            pipe.send(None)
        except BrokenPipeError:
            raise
        except Exception as error:
            pipe.send(error)


def on_ray(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], address: str
) -> Iterator[tuple[int, Any]]:
    """Run ``function`` on each piece of the work on the Ray cluster; yields numbers and what it returns, as it is done.

    Raises what it raises, and ``ReplayError`` where Ray is not installed or not there, or where a node fails.
    """
    try:
        import ray
    except ImportError as error:
        raise ReplayError("--ray needs Ray: pip install 'eplb-service[ray]'") from error
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ReplayError(f"no Ray cluster at {address} ({' '.join(str(error).split())})") from error
    try:
        task = ray.remote(max_retries=1)(function)
        numbers = {task.remote(*piece): number for number, piece in enumerate(work)}
        while numbers:
            ended, _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(ended[0])
            try:
                found = ray.get(ended[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise ReplayError(f"a Ray node failed ({' '.join(str(error).split())})") from error
            yield number, found
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
