"""What every demo does: a service, rank processes beside it, and the score, with a callback for whoever watches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from eplb_service.control.server.settings import ServiceSettings
from eplb_service.demo.ranks import rank_processes
from eplb_service.demo.scoreboard import Scoreboard
from eplb_service.demo.service_thread import service_thread
from eplb_service.placement import check_shape
from eplb_service.planner.settings import DEAL, STEP, TABLES, PlannerSettings
from eplb_service.telemetry.logs import configure_logs

REPORT_EVERY_STEPS = 4

Watch = Callable[[Scoreboard, str], None]
"""Called with the score and a line of status whenever there is news."""


class DemoError(ValueError):
    """A demo that cannot be set up; the message says what to change."""


@dataclass(frozen=True)
class Stage:
    """What is served, and how it is balanced.

    Parameters
    ----------
    steps, layers, experts
        T, L and E of what is balanced.
    ranks, redundant
        R, and slots per layer beyond one per expert.
    dispatcher
        ``"all2allv"``, ``"allgather"``, ``"mc2"``, or ``"moge"``, under which experts stay on their ranks.
    split
        ``"tables"``, ``"deal"`` or ``"step"``: how the balanced layers split tokens over replicas.
    window, interval
        Steps that a decision looks at, and steps from one to the next.
    policy, seed
        As in the service's settings.
    service
        Where the service is; ``None`` for one of the demo's own.
    metrics
        ``host:port`` of its own service's metrics and web page.
    deployment
        Name that the ranks give.

    Raises ``PlacementError`` or ``DemoError`` where no such layers could be laid out.
    """

    steps: int
    layers: int
    experts: int
    ranks: int
    redundant: int
    dispatcher: str
    split: str
    window: int
    interval: int
    policy: str
    seed: int
    service: str | None = None
    metrics: str = "127.0.0.1:0"
    deployment: str = "demo"

    def __post_init__(self) -> None:
        check_shape(self.experts, self.ranks, self.slots)
        missing = -(self.experts + self.redundant) % self.ranks
        if missing:
            raise DemoError(
                f"{self.experts} experts and {self.redundant} redundant ones do not fill {self.ranks} ranks evenly; "
                f"use --redundant {self.redundant + missing}"
            )

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return (self.experts + self.redundant) // self.ranks


def perform(stage: Stage, program: str, orders: Mapping[str, object], watch: Watch) -> Scoreboard:
    """Run rank processes of the module ``program``, which get ``orders`` beside those of the stage.

    Raises
    ------
    RankDiedError
        Where a rank fails.
    DemoError
        Where they end early.
    """
    board = Scoreboard(stage.ranks, stage.layers)
    with TemporaryDirectory(prefix="eplb-demo-", ignore_cleanup_errors=True) as scratch:
        with _service(stage, lambda status: watch(board, status)) as (address, status):
            watch(board, f"{status}; starting {stage.ranks} ranks")
            task = _write_task(stage, orders, address, Path(scratch))
            with rank_processes(program, task, stage.ranks) as ranks:
                while ranks.running:
                    line = ranks.take(timeout=0.2)
                    if line is not None:
                        board.add(line)
                        watch(board, status)
        if board.steps < stage.steps:
            raise DemoError(f"the ranks ended after {board.steps} of {stage.steps} steps")
    return board


@contextmanager
def _service(stage: Stage, announce: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """The service's address, and a line on where it is: one that runs, or the demo's own."""
    if stage.service is not None:
        yield stage.service, f"service at {stage.service}"
        return
    announce("starting the service; the solver is compiled the first time, which takes a while")
    settings = _service_settings(stage)
    configure_logs(level=settings.log_level)
    with service_thread(settings) as service:
        yield service.address, f"service at {service.address}, web page at {service.page_url}"


def _service_settings(stage: Stage) -> ServiceSettings:
    planner: dict[str, Any] = {"policy": stage.policy, "seed": stage.seed, "split": stage.split}
    return ServiceSettings(
        listen="127.0.0.1:0",
        metrics=stage.metrics,
        store=":memory:",
        window_steps=stage.window,
        decision_interval=stage.interval,
        report_steps=min(8, stage.interval),
        log_level="error",
        **planner,
    )


def _write_task(stage: Stage, orders: Mapping[str, object], service: str, scratch: Path) -> Path:
    """The ranks' orders, in a file."""
    # The ranks are another package's, which this one does not import: they meet in this file's keys.
    task = scratch / "task.json"
    shared = {
        "service": service,
        "deployment": stage.deployment,
        "rendezvous": str(scratch / "rendezvous"),
        "ranks": stage.ranks,
        "slots": stage.slots,
        "dispatcher": stage.dispatcher,
        "split": STEP if stage.split == STEP else TABLES,
        "dealing_width": PlannerSettings.deal_width if stage.split == DEAL else 1,
        "seed": stage.seed,
        "report_every": REPORT_EVERY_STEPS,
    }
    task.write_text(json.dumps({**shared, **orders}))
    return task
