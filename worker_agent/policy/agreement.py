"""Agreement of all ranks on one decision: the first rank decides and broadcasts the result."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from worker_agent.policy.figures import Int64, log_decision

_log = logging.getLogger("eplb.agent")

_WARM_UP_SECONDS = 120.0
"""Maximum time, in seconds, that the engine's start waits for the planner to warm up."""


class RemoteDecision(Protocol):
    """Function that asks a service for a decision."""

    def __call__(
        self, heat_NLE: npt.NDArray[np.generic], old_LP: Int64, ranks: int, nodes: int, timed: bool
    ) -> Int64:
        """Return the new placement, int64 ``[L, P]``.

        Raises ``RemoteDecisionError`` if no valid answer arrives in time.
        """
        ...


class RemoteDecisionError(RuntimeError):
    """Raised if the service does not decide within the deadline, or if its answer is invalid."""


class Agreement:
    """Agreement of an EP group's ranks on each decision.

    The first rank decides, and broadcasts the placement over the engine's CPU group. If it cannot decide, it
    broadcasts this fact, and the engine's own policy decides on all ranks. Therefore, the ranks agree even if one of
    them loads the planner more slowly than the others, loses its connection to the service, or has a CPU that rounds
    differently.

    Parameters
    ----------
    group
        CPU-capable process group of the EP ranks. Only the thread that calls ``placement`` may use it.
    split
        The engine's split of an expert's tokens over its replicas.
    remote
        Function that asks a service for decisions, called on the first rank; ``None`` to decide locally.

    Attributes
    ----------
    is_first
        True on the first rank of the group.
    ranks
        R, number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup, split: str, remote: RemoteDecision | None = None) -> None:
        self._group = group
        self._first = dist.get_global_rank(group, 0)
        self.is_first = dist.get_rank(group) == 0
        self.ranks = dist.get_world_size(group)
        self._split = split
        self._remote = remote
        self._warm = threading.Event()
        self._warming: threading.Thread | None = None
        if self.is_first:
            self._warming = threading.Thread(target=self._warm_up, name="eplb-policy-warm-up", daemon=True)
            self._warming.start()

    def _warm_up(self) -> None:
        """Import the planner and compile its kernels, which takes up to 20 seconds of CPU time."""
        try:
            from eplb_core.solver.warmup import warm_up
            from worker_agent.policy import decide  # noqa: F401, imported here so that a decision does not wait for it

            warm_up(1)
            self._warm.set()
        except Exception as error:
            _log.error("the planner cannot run; the engine's own policy decides", exc_info=error)

    def wait_until_warm(self, seconds: float = _WARM_UP_SECONDS) -> bool:
        """Wait until the planner's kernels are loaded or compiled. Call this while the engine starts.

        Parameters
        ----------
        seconds
            Maximum wait. If it is exceeded, the engine's own policy decides until the kernels are ready.

        Returns
        -------
        bool
            True if this rank can decide; always True on ranks other than the first.
        """
        if self._warming is None:
            return True
        self._warming.join(seconds)
        return self._warm.is_set()

    def placement(
        self,
        heat_NLE: npt.NDArray[np.generic],
        old_LP: Int64,
        ranks: int,
        *,
        nodes: int = 1,
        timed: bool = True,
    ) -> Int64 | None:
        """Return the placement on which all ranks agree (collective over the group).

        Parameters
        ----------
        heat_NLE, old_LP, ranks, nodes, timed
            As for ``decide``; equal on all ranks.

        Returns
        -------
        ndarray or None
            int64 ``[L, P]``; ``None`` on all ranks if the engine's own policy must decide.
        """
        decided = (
            self.decided_here(heat_NLE, old_LP, ranks, nodes=nodes, timed=timed) if self.is_first else None
        )
        return self.share(decided, old_LP.shape)

    def share(self, decided: Int64 | None, shape: tuple[int, ...]) -> Int64 | None:
        """Return the first rank's value of ``decided`` on all ranks (collective over the group)."""
        message = torch.zeros(1 + int(np.prod(shape)), dtype=torch.int64)
        if decided is not None:
            message[0] = 1
            message[1:] = torch.from_numpy(np.ascontiguousarray(decided)).reshape(-1)
        dist.broadcast(message, src=self._first, group=self._group)
        return message[1:].numpy().reshape(shape) if message[0] else None

    def decided_here(
        self,
        heat_NLE: npt.NDArray[np.generic],
        old_LP: Int64,
        ranks: int,
        *,
        nodes: int = 1,
        timed: bool = True,
    ) -> Int64 | None:
        """Decide without telling the other ranks. Only the first rank may call this, from any thread.

        The result must be passed to ``share``.

        Parameters
        ----------
        heat_NLE, old_LP, ranks, nodes, timed
            As for ``placement``.
        """
        if self._remote is not None:
            try:
                return self._remote(heat_NLE, old_LP, ranks, nodes, timed)
            except RemoteDecisionError as error:
                _log.warning("the service did not decide, so this rank does: %s", error)
            except Exception as error:
                _log.error("the request to the service failed, so this rank decides", exc_info=error)
        if not self._warm.is_set():
            _log.info("the planner's kernels are still being compiled; the engine's own policy decides")
            return None
        from worker_agent.policy.decide import decide

        began = time.perf_counter()
        new_LP = decide(heat_NLE, old_LP, ranks, nodes=nodes, split=self._split, timed=timed)
        if new_LP is not None:
            log_decision(heat_NLE, old_LP, new_LP, ranks, time.perf_counter() - began, self._split)
        return new_LP
