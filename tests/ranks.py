"""A runner for functions on real gloo ranks, one process each. It returns their results or tracebacks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# After one rank fails, the other ranks have this long to leave their collective before they are killed.
_GRACE_SECONDS = 1.0


# Importing these modules before the fork saves half a second per rank.
_PRELOADED = ["torch", "torch.distributed", "worker_agent.agent", "eplb_lab.layer"]


class RankFailure(AssertionError):
    """Raised if a rank raises an error, dies or misses the deadline. The message has one line per failed rank."""


class Ranks:
    """A gloo process group of ``world`` processes that stay alive between calls of ``run``.

    Functions must be importable (defined at module level), and their arguments and results must be picklable. Each rank
    has one torch thread, and ``torch.distributed`` is initialised, so ``dist.get_rank()`` returns the process's rank.
    After a failure, all processes are killed and the next ``run`` starts new ones, so that hypothesis can shrink a
    failing case.
    """

    def __init__(self, world: int, deadline: float = 240.0) -> None:
        self.world = world
        self.deadline = deadline
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank, and return the results in rank order.

        Raises ``RankFailure`` if a rank raises an error, dies or misses the deadline.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for connection in self._connections:
            # A rank that has died is detected later: reading from its closed pipe fails.
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(job)
        results, failures = self._collect()
        if failures:
            self._kill()
            raise RankFailure("\n".join(f"rank {rank}: {story}" for rank, story in failures.items()))
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """Terminate the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=5.0)
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="eplb-ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, str(store), self.deadline, child_end), daemon=True
            )
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)

    def _collect(self) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        end = time.monotonic() + self.deadline
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    done, outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=1.0)
                    done = False
                    outcome = f"died with exit code {self._processes[rank].exitcode}"
                (results if done else failures)[rank] = outcome
            if failures:
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        for rank in pending.values():
            failures[rank] = (
                "had not finished when another rank failed"
                if failures
                else f"did not finish in {self.deadline:g} s"
            )
        return results, failures

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes = []
        self._connections = []
        self._folder = None


def run_ranks(world: int, function: Callable[..., Any], *args: Any, deadline: float = 240.0) -> list[Any]:
    """Call ``function(*args)`` on ``world`` new gloo ranks, and return the results in rank order.

    Raises ``RankFailure`` if a rank raises an error, dies, or does not finish within ``deadline`` seconds.
    """
    with Ranks(world, deadline) as ranks:
        return ranks.run(function, *args)


def _serve(rank: int, world: int, store: str, deadline: float, connection: Connection) -> None:
    """Run the functions that arrive at a rank's process until the pipe closes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=deadline),
    )
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        try:
            function, args = pickle.loads(job)
            reply = pickle.dumps((True, function(*args)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)
    dist.destroy_process_group()
