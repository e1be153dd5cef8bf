"""One demo from start to end: a service, its ranks, and the score, with a callback for whoever watches."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_service.control.settings import ServiceSettings
from eplb_service.demo.ranks import rank_processes
from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.service_thread import service_thread
from eplb_service.placement import check_shape
from eplb_service.telemetry.logs import configure_logs

REPORT_EVERY_STEPS = 4


@dataclass(frozen=True)
class DemoSettings:
    """What to run.

    Parameters
    ----------
    counts_TLE
        Heat to serve, int ``[T, L, E]``.
    ranks, redundant
        R, and slots per layer beyond one per expert.
    hidden, intermediate
        H and I of each expert.
    dispatcher
        ``"all2allv"`` or ``"allgather"``.
    window, interval
        Steps that a decision looks at, and steps from one to the next.
    policy, seed
        As in the service's settings.
    """

    counts_TLE: npt.NDArray[np.integer]
    ranks: int
    redundant: int
    hidden: int
    intermediate: int
    dispatcher: str
    window: int
    interval: int
    policy: str
    seed: int

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return int(self.counts_TLE.shape[2] + self.redundant) // self.ranks


def check(settings: DemoSettings) -> None:
    """Raise ``PlacementError`` or ``ValueError`` where no such layers could be laid out."""
    experts = settings.counts_TLE.shape[2]
    check_shape(experts, settings.ranks, settings.slots)
    if (experts + settings.redundant) % settings.ranks:
        missing = -(experts + settings.redundant) % settings.ranks
        raise DemoError(
            f"{experts} experts and {settings.redundant} redundant ones do not fill {settings.ranks} ranks evenly; "
            f"use --redundant {settings.redundant + missing}"
        )


class DemoError(ValueError):
    """A demo that cannot be set up; the message says what to change."""


def run(settings: DemoSettings, watch: Callable[[Scoreboard, str], None]) -> Scoreboard:
    """Run the demo; ``watch`` is called with the score and a line of status whenever there is news.

    Raises ``RankDiedError`` where a rank fails.
    """
    steps, layers, _ = settings.counts_TLE.shape
    board = Scoreboard(settings.ranks, layers)
    scratch = Path(tempfile.mkdtemp(prefix="eplb-demo-"))
    try:
        watch(board, "starting the service; the solver is compiled the first time, which takes a while")
        service_settings = ServiceSettings(
            listen="127.0.0.1:0",
            metrics="127.0.0.1:0",
            store=":memory:",
            window_steps=settings.window,
            decision_interval=settings.interval,
            report_steps=min(8, settings.interval),
            policy=settings.policy,
            seed=settings.seed,
            log_level="error",
        )
        configure_logs(level=service_settings.log_level)
        with service_thread(service_settings) as service:
            watch(board, f"service at {service.address}; starting {settings.ranks} ranks")
            task = _write_task(settings, service.address, scratch)
            with rank_processes(task, settings.ranks) as ranks:
                while ranks.running:
                    line = ranks.take(timeout=0.2)
                    if line is not None:
                        board.add(line)
                        watch(
                            board,
                            f"service at {service.address}, metrics at http://{service.metrics_address}/metrics",
                        )
        if board.steps < steps:
            raise DemoError(f"the ranks ended after {board.steps} of {steps} steps")
        return board
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_task(settings: DemoSettings, service: str, scratch: Path) -> Path:
    """The ranks' orders, in files."""
    np.save(scratch / "counts.npy", settings.counts_TLE.astype(np.int64))
    # The ranks are another package's, which this one does not import: they meet in this file's keys.
    orders = {
        "counts": str(scratch / "counts.npy"),
        "service": service,
        "rendezvous": str(scratch / "rendezvous"),
        "ranks": settings.ranks,
        "slots": settings.slots,
        "hidden": settings.hidden,
        "intermediate": settings.intermediate,
        "dispatcher": settings.dispatcher,
        "seed": settings.seed,
        "report_every": REPORT_EVERY_STEPS,
    }
    task = scratch / "task.json"
    task.write_text(json.dumps(orders))
    return task
