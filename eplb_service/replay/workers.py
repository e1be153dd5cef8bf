"""Runs a replay's jobs on all cores, or on a Ray cluster, and hands their progress back as it comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from eplb_service.replay.jobs import Job, Progress, Scene, TraceFile, run_file
from eplb_service.replay.schedule import ReplayError

_CONTEXT = multiprocessing.get_context("spawn")
_CONNECT_SECONDS = 5.0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_here(jobs: Sequence[Job], file: TraceFile, scene: Scene) -> Iterator[tuple[int, Progress]]:
    """All jobs in this process; yields each job's number and progress."""
    for number, job in enumerate(jobs):
        for progress in run_file(job, file, scene):
            yield number, progress


def run_in_processes(
    jobs: Sequence[Job], file: TraceFile, scene: Scene, workers: int
) -> Iterator[tuple[int, Progress]]:
    """All jobs on ``workers`` processes; yields each job's number and progress, a job's own in order.

    Raises what a job raises, and ``ReplayError`` where a process dies. Closing the iterator ends the processes.
    """
    crew = [_Worker(file, scene) for _ in range(min(workers, len(jobs)))]
    waiting = list(enumerate(jobs))[::-1]
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in crew:
            worker.give(*waiting.pop())
            busy[worker.pipe] = worker
        while busy:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                message = worker.hear()
                if isinstance(message, Progress):
                    yield worker.number, message
                elif waiting:
                    worker.give(*waiting.pop())
                else:
                    del busy[worker.pipe]
    finally:
        for worker in crew:
            worker.end()


def run_on_ray(
    jobs: Sequence[Job], file: TraceFile, scene: Scene, address: str
) -> Iterator[tuple[int, Progress]]:
    """All jobs on the Ray cluster at ``address`` (``local``: one on this machine); each node must see the trace.

    Progress comes job by job. Raises ``ReplayError`` where Ray is not installed or not there, or where a node fails.
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
        task = ray.remote(max_retries=1)(_whole)
        numbers = {task.remote(job, file, scene): number for number, job in enumerate(jobs)}
        while numbers:
            done, _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(done[0])
            try:
                for progress in ray.get(done[0]):
                    yield number, progress
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


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, file: TraceFile, scene: Scene) -> None:
        self.number = -1
        self.pipe, theirs = _CONTEXT.Pipe()
        self._process: SpawnProcess = _CONTEXT.Process(target=_work, args=(theirs, file, scene), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, number: int, job: Job) -> None:
        self.number = number
        self.pipe.send(job)

    def hear(self) -> Any:
        """Its next word: progress, or ``None`` at the end of a job; raises what it raised."""
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


def _work(pipe: Connection, file: TraceFile, scene: Scene) -> None:
    """A worker process: jobs in, progress out, until the pipe closes."""
    # Ctrl-C is for the process that gives out the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            for progress in run_file(job, file, scene):
                pipe.send(progress)
            pipe.send(None)
        except BrokenPipeError:
            return
        except Exception as error:
            pipe.send(error)


def _whole(job: Job, file: TraceFile, scene: Scene) -> list[Progress]:
    return list(run_file(job, file, scene))
