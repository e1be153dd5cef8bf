"""Runs a replay's jobs on all cores, or on a Ray cluster, and hands their progress back as it comes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from eplb_service.replay.jobs import Job, JobProgress, ResumePoint, Scene, TraceFile, run_file
from eplb_service.replay.schedule import ReplayError

_CONTEXT = multiprocessing.get_context("spawn")
_CONNECT_SECONDS = 5.0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_in_processes(
    jobs: Sequence[Job], file: TraceFile, scene: Scene, done: Sequence[ResumePoint], workers: int
) -> Iterator[tuple[int, JobProgress]]:
    """What is left of all jobs, shared out to processes; yields each job's number and progress.

    A process runs its share side by side and so reads the trace once. Closing the iterator ends the processes.

    Parameters
    ----------
    jobs
        All, also those that are done.
    file, scene
        The trace, and on which ranks and slots it is replayed.
    done
        How far each job has got.
    workers
        How many processes.

    Raises
    ------
    ReplayError
        Where a process dies; and whatever a job raises.
    """
    yield from in_processes(_share_done, [(file, scene, share) for share in _shares(jobs, done, workers)])


def in_processes(
    function: Callable[..., Iterable[tuple[int, Any]]], shares: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Any]]:
    """What ``function`` yields of each share of the work, which has a process of its own, as it comes.

    Raises what it raises, and ``ReplayError`` where a process dies. Closing the iterator ends the processes.
    """
    crew = [_Worker(function, share) for share in shares]
    busy: dict[Connection, _Worker] = {worker.pipe: worker for worker in crew}
    try:
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                message = worker.hear()
                if message is None:
                    del busy[worker.pipe]
                else:
                    yield message
    finally:
        for worker in crew:
            worker.end()


def run_on_ray(
    jobs: Sequence[Job], file: TraceFile, scene: Scene, done: Sequence[ResumePoint], address: str
) -> Iterator[tuple[int, JobProgress]]:
    """What is left of all jobs, on a Ray cluster; progress comes job by job.

    Parameters
    ----------
    jobs, file, scene, done
        As for ``run_in_processes``; each node must see the trace.
    address
        The cluster's; ``local``: one on this machine.

    Raises
    ------
    ReplayError
        As ``on_ray``.
    """
    work = [(job, file, scene, done[number]) for number, job in enumerate(jobs)]
    for number, reported in on_ray(_whole, work, address):
        for progress in reported:
            yield number, progress


def on_ray(
    function: Callable[..., Any], work: Sequence[tuple[Any, ...]], address: str
) -> Iterator[tuple[int, Any]]:
    """What ``function`` returns of each piece of the work, by its number, as it is done on the Ray cluster.

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


_Share = list[tuple[int, Job, ResumePoint]]
"""Jobs with their numbers, and what has been done of each."""

_EFFORT = {"none": 1, "deepseek": 8, "flashlb": 24}
"""About how long a decision takes beside one that does nothing, for sharing out jobs alike; any other policy as long as
flashlb, and hindsight longer, because it places every layer from scratch."""
_HINDSIGHT = 32
"""As ``_EFFORT``, where hindsight is wanted as well."""


def _shares(jobs: Sequence[Job], done: Sequence[ResumePoint], workers: int) -> list[_Share]:
    """The jobs in shares of about the same effort, none of them empty: the longest first, each to who has least."""
    numbered = list(zip(range(len(jobs)), jobs, done, strict=True))
    shares: list[_Share] = [[] for _ in range(min(workers, len(jobs)))]
    efforts = [0.0] * len(shares)
    for entry in sorted(numbered, key=lambda entry: -_effort(entry[1])):
        least = efforts.index(min(efforts))
        shares[least].append(entry)
        efforts[least] += _effort(entry[1])
    return shares


def _effort(job: Job) -> float:
    if job.policy is None:
        decision = _HINDSIGHT if job.hindsight is not None else _EFFORT["none"]
    else:
        decision = _EFFORT.get(job.policy.name, _EFFORT["flashlb"])
    return decision / job.setup.schedule.interval


class _Worker:
    """One process with its share of the work, and the pipe from it."""

    def __init__(self, function: Callable[..., Iterable[tuple[int, Any]]], share: tuple[Any, ...]) -> None:
        self.pipe, theirs = _CONTEXT.Pipe(duplex=False)
        arguments = (theirs, function, share)
        self._process: SpawnProcess = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """Its next word: a job's number and progress, or ``None`` at the end; raises what it raised."""
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
    """A worker process: what comes of its share, until that is done or nobody hears."""
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


def _share_done(file: TraceFile, scene: Scene, share: _Share) -> Iterator[tuple[int, JobProgress]]:
    numbers, jobs, done = zip(*share, strict=True)
    for number, progress in run_file(jobs, file, scene, done):
        yield numbers[number], progress


def _whole(job: Job, file: TraceFile, scene: Scene, done: ResumePoint) -> list[JobProgress]:
    # Where a job stood on its way is of no use once it is through.
    reported = [progress for _, progress in run_file([job], file, scene, [done])]
    return [*(replace(progress, state=None) for progress in reported[:-1]), *reported[-1:]]
