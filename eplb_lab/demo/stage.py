"""Run a demo with a service, rank processes that serve a model or a trace, and a scoreboard."""

from __future__ import annotations

import asyncio
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
from eplb_service.control.server.service import RunningService, run_service
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.telemetry.logs import configure_logs

_REPORT_EVERY_STEPS = 4
_EMBEDDED = Path(__file__).parents[1] / "model" / "byte-moe"
_DEVICE = Path(__file__).with_name("h100.json")
DEVICE_NAME = "H100"
DEVICE_TOKENS = 128
"""Number of tokens on the emulated device that each token of the demo represents.

The demo has only a few dozen tokens per step. With so few, reading the weights would dominate a device's step time.
"""
DEVICE_LAYERS = 58
"""Number of MoE layers in DeepSeek-V3. Each layer of the demo represents an equal share of them."""

Watch = Callable[[Scoreboard, str], None]
"""Callback that receives the scoreboard and a status line after each change."""


class _DemoError(ValueError):
    """Raised if the demo cannot be set up or stops early. The message gives the reason."""


@dataclass(frozen=True)
class Stage:
    """Sizes and balancing settings of a demo run.

    Raises ``PlacementError`` or ``_DemoError`` if the experts do not fit in the slots.

    Parameters
    ----------
    steps
        T, the number of steps to serve.
    layers
        L, the number of MoE layers.
    experts
        E, the number of logical experts per layer.
    ranks
        R, the number of rank processes.
    redundant
        Number of redundant slots per layer, over all ranks.
    dispatcher
        Token dispatcher, as for ``eplb demo --dispatcher``.
    split
        Method of splitting an expert's tokens over its replicas, as for ``eplb demo --split``.
    window
        Number of steps that a decision uses.
    interval
        Number of steps between decisions.
    policy
        Policy of the service that the demo starts.
    seed
        Seed for the requests or tokens, and for the solver.
    service
        Address of a running service; ``None`` to start one.
    metrics
        ``host:port`` for the metrics and the web page of the service that the demo starts.
    deployment
        Name of the deployment.
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
                f"{self.experts} experts and {self.redundant} redundant slots cannot be split evenly over {self.ranks} "
                f"ranks; use --redundant {self.redundant + missing}"
            )

    @property
    def slots(self) -> int:
        """S, the number of slots per rank."""
        return (self.experts + self.redundant) // self.ranks


def model_sizes(checkpoint: Path | None = None) -> tuple[int, int, int]:
    """Return a model's numbers of MoE layers, experts, and choices per token. Does not need torch.

    Raises ``FileNotFoundError`` if the directory does not exist, and ``_DemoError`` if the model has no experts.

    Parameters
    ----------
    checkpoint
        Checkpoint directory; ``None`` for the embedded model.
    """
    checkpoint = checkpoint or _EMBEDDED
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    if not experts:
        raise _DemoError(f"{checkpoint}: the model has no experts; use the folder of an MoE checkpoint")
    dense_layers = config.get("mlp_only_layers") or []
    sparse_step = config.get("decoder_sparse_step", 1)
    layers = [
        layer
        for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])
        if layer not in dense_layers and (layer + 1) % sparse_step == 0
    ]
    return len(layers), experts, config["num_experts_per_tok"]


def perform(stage: Stage, program: str, orders: Mapping[str, object], watch: Watch) -> Scoreboard:
    """Run the demo and return its scoreboard.

    Raises ``RankDiedError`` if a rank fails, and ``_DemoError`` if the ranks exit before the last step.

    Parameters
    ----------
    stage
        Sizes and balancing settings.
    program
        Module that each rank process runs.
    orders
        Fields of the ranks' task in addition to those from the stage. Arrays are passed as files.
    watch
        Progress callback.
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
            raise _DemoError(f"the ranks exited after {board.steps} of {stage.steps} steps")
    return board


@contextmanager
def _service(stage: Stage, announce: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Yield the address of the service and a status line. Start a service unless the stage names a running one."""
    if stage.service is not None:
        yield stage.service, f"service at {stage.service}"
        return
    announce("starting the service; the first start compiles the solver, which takes a while")
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
    """Run a service on a thread of this process, and yield it once its solver is compiled. Raises startup errors."""
    started: Future[RunningService] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with run_service(settings) as service:
            await service.warm
            started.set_result(service)
            await stop.wait()

    with closing(loop), ThreadPoolExecutor(1, "eplb-demo-service") as thread:
        ended = thread.submit(loop.run_until_complete, serve())
        try:
            events: tuple[Future[Any], ...] = (started, ended)
            wait(events, return_when=FIRST_COMPLETED)
            if started.done():
                yield started.result()
        finally:
            loop.call_soon_threadsafe(stop.set)
        ended.result()


def device_text() -> str:
    """Return a line that explains the emulated step times."""
    return (
        f"emulated: each rank stands for an {DEVICE_NAME} with DeepSeek-V3's {DEVICE_LAYERS} MoE layers, and each "
        f"token stands for {DEVICE_TOKENS} tokens; a step takes as long as the experts of its hottest rank, according "
        "to a cost curve"
    )


def _device() -> dict[str, float]:
    """Return the fields of ``eplb_lab.ranks.device.Device`` for the shipped cost curve."""
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
    """Write the ranks' task to a file and return its path."""
    # The demo runs without torch, so it does not import the rank programs. Their ``Task`` has the same keys.
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
