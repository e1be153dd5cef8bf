"""Runs policies in a process of their own, so that one that crashes or never ends costs only its own figures.

Ours and the peers run in the same kind of process, one thread each, and are asked in turn, never at the same time.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from eplb_service.bench.decision import Decision, Policy, Scene

Maker = Callable[[], Policy]
"""Makes a policy; travels to the process, so it must be importable there."""


class PolicyFailedError(RuntimeError):
    """A policy that crashed, refused or took too long; the message says which."""


class PolicyProcess:
    """One process that decides by policies it is given.

    Parameters
    ----------
    limit_seconds
        Wall time after which a decision is given up and the process ended.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def decide(self, maker: Maker, scene: Scene, *, fresh: bool = True) -> Decision:
        """Have a policy decide: a fresh one, or the one of the last call with all that it remembers.

        Raises ``PolicyFailedError``; the next call starts a new process where this one was lost.
        """
        if self._process is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((maker if fresh else None, scene))
            if not self._connection.poll(self.limit_seconds):
                raise PolicyFailedError(f"took more than {self.limit_seconds:g} s")
            answer = self._connection.recv()
        except (PolicyFailedError, EOFError, OSError) as error:
            self.close()
            reason = str(error) if isinstance(error, PolicyFailedError) else "its process died"
            raise PolicyFailedError(reason) from error
        if isinstance(answer, Decision):
            return answer
        raise PolicyFailedError(answer)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._connection = here
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        self._process = process
        there.close()


def _serve(connection: Connection) -> None:
    """What the process does: decide until nobody asks any more."""
    # Ctrl-C reaches both processes; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    policy: Policy | None = None
    while True:
        try:
            maker, scene = connection.recv()
        except EOFError:
            return
        try:
            policy = maker() if maker is not None else policy
            assert policy is not None
            connection.send(policy.decide(scene))
        except Exception:
            connection.send(traceback.format_exc(limit=-1).strip().splitlines()[-1])
