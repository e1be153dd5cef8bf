"""A benchmark run: a service, two servers, and rounds of requests that are sent to the servers alternately."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.vllm_serving.load import drifting_requests, send_all
from benchmarks.vllm_serving.score import ALONE, BALANCED, KEEPING, KINDS, NOTHING, RESTING, Round, figures
from eplb_core.wire.generated.operator_pb2 import DeploymentStatus
from eplb_lab.model.checkpoint import EMBEDDED
from tests.e2e.service import Service, free_address
from tests.engines.conftest import engine_environment
from tests.engines.openai_server import OpenAiServer

DEPLOYMENT = "byte-moe"
_SERVICE_FLAGS = [
    "--store",
    ":memory:",
    "--window-steps",
    "64",
    "--decision-interval",
    "32",
    "--report-steps",
    "16",
    "--cpu-share",
    "1",
]
_KEEPS = ("--min-gain", "1e9")
_SECONDS_BETWEEN_QUESTIONS = 0.3
_LAST_REPORT_SECONDS = 3.0
_SEEN_SECONDS = 60.0
_NEVER = 10**9
_POLICY_WINDOW = 64
"""Window and interval of vLLM's own EPLB in policy mode, in steps."""


def serve_policy(
    python: Path, site: Path, options: Namespace, folder: Path, console: Console
) -> dict[str, Any]:
    """Run all rounds with the planner inside vLLM's own EPLB and no service, and return the figures.

    The parameters and errors are the same as for ``serve_both``.
    """
    rounds = rounds_of(options.requests, options.rounds, options.seed)
    measured = folder / "eplb.jsonl"
    agent = {
        "EPLB_AGENT_MODE": "policy",
        **step_split(options.split),
        "EPLB_TEST_MEASURE": str(measured),
    }
    sizes = options.ranks, options.redundant, options.clients
    with contextlib.ExitStack() as running:
        servers = {
            kind: running.enter_context(
                OpenAiServer(python, folder / f"{kind}.log", EMBEDDED, command, environment(site, variables))
            )
            for kind, variables, command in (
                (ALONE, {}, server_options(*sizes)),
                (BALANCED, agent, server_options(*sizes, interval=_POLICY_WINDOW)),
            )
        }
        for kind, server in servers.items():
            console.print(f"starting vLLM, {kind}: {options.ranks} ranks on CPU; this takes about a minute")
            server.wait_until_healthy()
        console.print("warming up: both servers compile their kernels on the first requests")
        for server in servers.values():
            send_all(server.port, drifting_requests(options.clients, options.seed + 1), options.clients)
        _take_turns(rounds, servers, options.clients, _Measured(measured), console)
    switched, par = measured_figures(measured)
    return figures(rounds, switched, par)


class _Measured:
    """Progress line, computed from the file that the test plugin ``measure_eplb`` writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def line(self) -> str:
        switched, par = measured_figures(self._path)
        return (
            f"vLLM's EPLB: PAR {par['before']:.3f} before the first move, {par['after']:.3f} since; "
            f"{switched['experts_moved']} experts fetched"
        )


def measured_figures(path: Path) -> tuple[dict[str, int | None], dict[str, float]]:
    """Return the moves and the mean PAR before and after the first move, from the lines of ``measure_eplb``.

    ``layers_switched`` counts rearrangements that moved an expert. ``bytes_moved`` is ``None``, because vLLM does not
    count bytes.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    moved = [index for index, line in enumerate(lines) if line.get("fetched")]
    first = moved[0] if moved else len(lines)
    before = [line["imbalance"] for line in lines[:first] if "imbalance" in line]
    after = [line["imbalance"] for line in lines[first:] if "imbalance" in line]
    experts = sum(lines[index]["fetched"] for index in moved)
    switched = {"layers_switched": len(moved), "experts_moved": experts, "bytes_moved": None, "steps_lost": 0}
    return switched, {
        "before": float(np.mean(before)) if before else math.nan,
        "after": float(np.mean(after)) if after else math.nan,
        "steps": len(before) + len(after),
    }


def serve_both(
    python: Path, site: Path, options: Namespace, folder: Path, console: Console
) -> dict[str, Any]:
    """Run all rounds and return the figures. Raises ``ServerError`` if a server does not start.

    Parameters
    ----------
    python
        Interpreter of vLLM's environment.
    site
        Directory with the agent, for that environment's ``PYTHONPATH``.
    options
        Command-line options.
    folder
        Directory for the logs.
    console
        Console for progress messages.
    """
    rounds = rounds_of(options.requests, options.rounds, options.seed)
    beside = options.beside
    flags = [*_SERVICE_FLAGS, *(_KEEPS if beside == KEEPING else ())]
    with Service(folder, *flags) as service, watching(service) as watched:
        agent = {
            "EPLB_AGENT_SERVICE": free_address() if beside == NOTHING else service.address,
            "EPLB_AGENT_DEPLOYMENT": DEPLOYMENT,
            "EPLB_AGENT_DATA_HOST": "127.0.0.1",
            **step_split(options.split),
        }
        command = server_options(options.ranks, options.redundant, options.clients)
        with contextlib.ExitStack() as running:
            servers = {
                kind: running.enter_context(
                    OpenAiServer(
                        python, folder / f"{kind}.log", EMBEDDED, command, environment(site, variables)
                    )
                )
                for kind, variables in ((ALONE, {}), (BALANCED, agent))
            }
            for kind, server in servers.items():
                console.print(
                    f"starting vLLM, {kind}: {options.ranks} ranks on CPU; this takes about a minute"
                )
                server.wait_until_healthy()
            console.print("warming up: both servers compile their kernels on the first requests")
            with contextlib.nullcontext() if beside == NOTHING else watched.left_alone(beside != RESTING):
                for server in servers.values():
                    send_all(
                        server.port, drifting_requests(options.clients, options.seed + 1), options.clients
                    )
            _take_turns(rounds, servers, options.clients, watched, console)
            time.sleep(_LAST_REPORT_SECONDS)
            switched = watched.switched()
    return figures(rounds, switched, watched.par())


def step_split(split: str) -> dict[str, str]:
    """Return the agent's variable that turns the split per step on or off."""
    return {"EPLB_AGENT_STEP_SPLIT": "on" if split == "step" else "off"}


def rounds_of(requests: int, rounds: int, seed: int) -> list[Round]:
    """Divide the load into rounds that have no answers yet."""
    load = drifting_requests(requests, seed)
    edges = [requests * turn // rounds for turn in range(rounds + 1)]
    return [Round(load[first:last]) for first, last in itertools.pairwise(edges)]


def server_options(ranks: int, redundant: int, sequences: int, interval: int = _NEVER) -> list[str]:
    """Return the options of an expert-parallel server whose own EPLB runs every ``interval`` steps."""
    eplb = {"num_redundant_experts": redundant, "use_async": False, "step_interval": interval}
    if interval != _NEVER:
        eplb |= {"window_size": interval, "communicator": "torch_gloo"}
    flags = ["--enable-expert-parallel", "--enable-eplb", "--no-enable-prefix-caching"]
    return [
        *("--served-model-name", DEPLOYMENT, "--max-num-seqs", str(sequences)),
        *("--tensor-parallel-size", str(ranks), "--eplb-config", json.dumps(eplb), *flags),
    ]


def environment(site: Path, agent: dict[str, str]) -> dict[str, str]:
    """Return a server's environment. ``agent`` holds the agent's variables and is empty if there is no agent."""
    on_cpu = engine_environment(site, VLLM_NO_USAGE_STATS="1")
    return {name: value for name, value in on_cpu.items() if not name.startswith("EPLB_")} | agent


def _take_turns(
    rounds: list[Round],
    servers: dict[str, OpenAiServer],
    clients: int,
    watched: Watched | _Measured,
    console: Console,
) -> None:
    """Send each round to both servers, alternating which server goes first."""
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounds", total=len(rounds) * len(KINDS))
        for number, turn in enumerate(rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):
                progress.update(task, description=f"{turn.phase}, {kind}")
                turn.answers[kind] = send_all(servers[kind].port, turn.requests, clients)
                progress.advance(task)
            console.print(f"{turn.line()}\n{watched.line}", highlight=False, soft_wrap=True)


class Watched:
    """The service's status for the balanced deployment, polled a few times per second."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before = math.nan
        self._after: list[float] = []
        self._steps = 0
        self.line = ""

    @contextlib.contextmanager
    def left_alone(self, plan_after: bool = True) -> Iterator[None]:
        """Pause planning while the context is active. On exit, wait until a PAR before any switch has been observed.

        Without the pause, a layer could switch before the first poll on a busy machine.

        Parameters
        ----------
        plan_after
            True to resume planning on exit.
        """
        with contextlib.suppress(grpc.RpcError):
            self._service.pause(DEPLOYMENT)
        try:
            yield
            end = time.monotonic() + _SEEN_SECONDS
            while math.isnan(self._before) and not self._after and time.monotonic() < end:
                time.sleep(_SECONDS_BETWEEN_QUESTIONS)
        finally:
            with contextlib.suppress(grpc.RpcError):
                if plan_after:
                    self._service.resume(DEPLOYMENT)

    def par(self) -> dict[str, float]:
        """Return the PAR of the last window before the first switch, the mean PAR after it, and the number of steps."""
        after = float(np.mean(self._after)) if self._after else math.nan
        return {"before": self._before, "after": after, "steps": self._steps}

    def ask(self) -> None:
        """Poll the status, ignoring errors because the agent may not have connected yet."""
        with contextlib.suppress(grpc.RpcError):
            self.take(self._service.status(DEPLOYMENT).status)

    def take(self, status: DeploymentStatus) -> None:
        """Record a status. The PAR is recorded only if the status includes new steps."""
        self.line = (
            f"service: PAR {status.par:.3f} of the last {status.window_steps} steps, "
            f"{status.layers_switched} layers switched, {status.experts_moved} experts moved "
            f"({status.bytes_moved / 1e6:.1f} MB); {status.last_decision}"
        )
        if status.steps_received == self._steps or not status.par > 0:
            return
        self._steps = status.steps_received
        if status.layers_switched == 0:
            self._before = status.par
        else:
            self._after.append(status.par)

    def switched(self) -> dict[str, int]:
        """Return the switch figures so far, which are zero if no agent has connected."""
        status = DeploymentStatus()
        with contextlib.suppress(grpc.RpcError):
            status = self._service.status(DEPLOYMENT).status
        names = ("layers_switched", "experts_moved", "bytes_moved", "steps_lost")
        return {name: getattr(status, name) for name in names}


@contextlib.contextmanager
def watching(service: Service) -> Iterator[Watched]:
    """Poll the service's status in a background thread while the context is active."""
    watched = Watched(service)
    over = threading.Event()

    def ask() -> None:
        while not over.wait(_SECONDS_BETWEEN_QUESTIONS):
            watched.ask()

    thread = threading.Thread(target=ask, name="status", daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()
