"""Runs a function on real gloo ranks, each its own process, and brings back results or tracebacks."""

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

# Ranks still in a collective with one that failed get this long to fail as well, then they are killed.
_GRACE_SECONDS = 1.0


# Imported once, before ranks are forked: half a second of each rank otherwise.
_PRELOADED = ["torch", "torch.distributed", "worker_agent.agent", "eplb_lab.layer"]


class RankFailure(AssertionError):
    """A rank raised, died or missed the deadline; the message holds each rank's story."""


class Ranks:
    """``world`` processes with a gloo default process group, kept alive between calls of ``run``.

    Functions must be importable (module level), arguments and results picklable. A rank has one thread and
    ``torch.distributed`` initialised: ``dist.get_rank()`` says where a function is. After a failure all
    processes are killed and the next ``run`` starts fresh ones, so that hypothesis can shrink a failing case.
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
        """Call ``function(*args)`` on every rank; return the results in order of rank.

        Raises ``RankFailure`` where a rank raises, dies, or is not done within the deadline.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args))
        for connection in self._connections:
            # A rank that has died since shows by its closed pipe when the replies are read.
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(job)
        results, failures = self._collect()
        if failures:
            self._kill()
            raise RankFailure("\n".join(f"rank {rank}: {story}" for rank, story in failures.items()))
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes."""
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
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, str(store), self.deadline, there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

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
                    done, outcome = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if done else failures)[rank] = outcome
            if failures:
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        for rank in pending.values():
            failures[rank] = (
                "was not done when another failed" if failures else f"not done in {self.deadline:g} s"
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
        self._processes, self._connections, self._folder = [], [], None


def run_ranks(world: int, function: Callable[..., Any], *args: Any, deadline: float = 240.0) -> list[Any]:
    """Call ``function(*args)`` on ``world`` fresh gloo ranks; return the results in order of rank.

    Raises ``RankFailure`` where a rank raises, dies, or is not done within ``deadline`` seconds.
    """
    with Ranks(world, deadline) as ranks:
        return ranks.run(function, *args)


def _serve(rank: int, world: int, store: str, deadline: float, connection: Connection) -> None:
    """Body of a rank's process: run what arrives until the pipe closes."""
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
