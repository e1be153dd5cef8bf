"""A demo's run: a service, rank processes beside it that serve the embedded model or a trace, and the score."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eplb_core.cost.curve import read_curve
from eplb_core.placement import check_shape
from eplb_core.planner.settings import DEAL, STEP, TABLES, PlannerSettings
from eplb_lab.demo.ranks import rank_reports
from eplb_lab.demo.scoreboard import Scoreboard
from eplb_service.control.server.service import RunningService, running_service
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.telemetry.logs import configure_logs

_REPORT_EVERY_STEPS = 4
_EMBEDDED = Path("model", "byte-moe")
_DEVICE = Path(__file__).with_name("h100.json")
DEVICE_NAME = "H100"
DEVICE_TOKENS = 128
"""Tokens of the emulated device per token of the demo. At a few dozen, reading weights would dominate."""
DEVICE_LAYERS = 58
"""MoE layers of DeepSeek-V3, which the demo's few layers stand for."""

Watch = Callable[[Scoreboard, str], None]
"""Called with the score and a line of status whenever there is news."""


class _DemoError(ValueError):
    """A demo that cannot be set up; the message says what to change."""


@dataclass(frozen=True)
class Stage:
    """Sizes of a run, and how it is balanced.

    Raises ``PlacementError`` or ``DemoError`` where no such layers could be laid out.

    Parameters
    ----------
    steps, layers, experts, ranks, redundant
        T, L, E and R, and slots per layer beyond one per expert.
    dispatcher, split, policy, seed
        As the options of ``eplb demo``.
    window, interval
        Steps that a decision looks at, and steps from one to the next.
    service, deployment
        Address of the service, ``None`` for one of the demo's own, and the name that the ranks give.
    metrics
        ``host:port`` of its own service's metrics and web page.
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
            raise _DemoError(
                f"{self.experts} experts and {self.redundant} redundant ones do not fill {self.ranks} ranks evenly; "
                f"use --redundant {self.redundant + missing}"
            )

    @property
    def slots(self) -> int:
        """S, slots per rank."""
        return (self.experts + self.redundant) // self.ranks


def model_sizes(checkpoint: Path | None = None) -> tuple[int, int, int]:
    """MoE layers, experts and choices per token of a checkpoint, or the embedded model, read without torch.

    Raises ``FileNotFoundError`` where there is none, ``DemoError`` where it is no Mixture-of-Experts model.
    """
    if checkpoint is None:
        agent = importlib.util.find_spec("worker_agent")
        if agent is None or agent.origin is None:
            raise FileNotFoundError(
                "the embedded model comes with the worker_agent package, which is not installed"
            )
        checkpoint = Path(agent.origin).parent / _EMBEDDED
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    if not experts:
        raise _DemoError(f"{checkpoint}: the model has no experts; give the folder of a MoE checkpoint")
    dense, sparse_step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    layers = [
        layer
        for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])
        if layer not in dense and (layer + 1) % sparse_step == 0
    ]
    return len(layers), experts, config["num_experts_per_tok"]


def perform(stage: Stage, program: str, orders: Mapping[str, object], watch: Watch) -> Scoreboard:
    """Run rank processes of the module ``program``, which get ``orders`` beside those of the stage.

    Arrays among the orders travel as files. Raises ``RankDiedError`` where a rank fails, ``DemoError`` where they end
    early.
    """
    board = Scoreboard(stage.ranks, stage.layers)
    with TemporaryDirectory(prefix="eplb-demo-", ignore_cleanup_errors=True) as scratch:
        with _service(stage, lambda status: watch(board, status)) as (address, status):
            watch(board, f"{status}; starting {stage.ranks} ranks")
            task = _write_task(stage, orders, address, Path(scratch))
            with closing(rank_reports(program, task, stage.ranks)) as reports:
                for line in reports:
                    board.add(line)
                    watch(board, status)
        if board.steps < stage.steps:
            raise _DemoError(f"the ranks ended after {board.steps} of {stage.steps} steps")
    return board


@contextmanager
def _service(stage: Stage, announce: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """The service's address, and a line on where it is: one that runs, or the demo's own."""
    if stage.service is not None:
        yield stage.service, f"service at {stage.service}"
        return
    announce("starting the service; the solver is compiled the first time, which takes a while")
    planner: dict[str, Any] = {"policy": stage.policy, "seed": stage.seed, "split": stage.split}
    settings = ServiceSettings(
        listen="127.0.0.1:0",
        metrics=stage.metrics,
        store=":memory:",
        window_steps=stage.window,
        decision_interval=stage.interval,
        report_steps=min(8, stage.interval),
        cpu_share=1.0,
        log_level="error",
        **planner,
    )
    configure_logs(settings.log_level)
    with _service_thread(settings) as service:
        yield service.address, f"service at {service.address}, web page at {service.page_url}"


@contextmanager
def _service_thread(settings: ServiceSettings) -> Iterator[RunningService]:
    """A service on a thread of this process, its solver compiled; whatever keeps it from starting is raised here."""
    started: Future[RunningService] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with running_service(settings) as service:
            await service.warm
            started.set_result(service)
            await stop.wait()

    with closing(loop), ThreadPoolExecutor(1, "eplb-demo-service") as thread:
        served = thread.submit(loop.run_until_complete, serve())
        try:
            either: tuple[Future[Any], ...] = (started, served)
            wait(either, return_when=FIRST_COMPLETED)
            if started.done():
                yield started.result()
        finally:
            loop.call_soon_threadsafe(stop.set)
        served.result()


def device_text() -> str:
    """Return one line that describes the ranks' step times."""
    return (
        f"emulated: each rank stands for an {DEVICE_NAME} with DeepSeek-V3's {DEVICE_LAYERS} MoE layers, each token "
        f"for {DEVICE_TOKENS}; a step takes as long as its hottest rank by a shipped cost curve, for the experts only"
    )


def _device() -> dict[str, float]:
    curve = read_curve(str(_DEVICE))
    return {
        "floor_us": curve.floor_us,
        "read_us": curve.read_us,
        "launch_us": curve.launch_us,
        "slope_us": curve.slope_us,
        "tokens": DEVICE_TOKENS,
        "layers": DEVICE_LAYERS,
    }


def _write_task(stage: Stage, orders: Mapping[str, object], service: str, scratch: Path) -> Path:
    """The ranks' orders, in a file."""
    # The ranks are another package's, which this one does not import: they meet in this file's keys.
    task = scratch / "task.json"
    shared: dict[str, object] = {
        "service": service,
        "deployment": stage.deployment,
        "rendezvous": str(scratch / "rendezvous"),
        "ranks": stage.ranks,
        "slots": stage.slots,
        "dispatcher": stage.dispatcher,
        "split": STEP if stage.split == STEP else TABLES,
        "dealing_width": PlannerSettings.deal_width if stage.split == DEAL else 1,
        "seed": stage.seed,
        "report_every": _REPORT_EVERY_STEPS,
        "device": _device(),
    }
    for name, order in orders.items():
        if isinstance(order, np.ndarray):
            np.save(scratch / f"{name}.npy", order)
            order = str(scratch / f"{name}.npy")
        shared[name] = order
    task.write_text(json.dumps(shared))
    return task
