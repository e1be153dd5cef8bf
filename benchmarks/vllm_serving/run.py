"""The run itself: a service, both servers, and the rounds of requests that they get by turns."""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console

from benchmarks.vllm_serving.load import Request, drifting_requests, send_all
from benchmarks.vllm_serving.score import ALONE, BALANCED, KINDS, Balance, Round, Switches, figures
from benchmarks.vllm_serving.screen import Screen, live
from benchmarks.vllm_serving.server import Server, Setting
from eplb_service.wire.generated.operator_pb2 import DeploymentStatus
from tests.e2e.service import Service

DEPLOYMENT = "byte-moe"
_SERVICE_FLAGS = (
    "--store",
    ":memory:",
    "--window-steps",
    "64",
    "--decision-interval",
    "32",
    "--report-steps",
    "8",
)
_SECONDS_BETWEEN_QUESTIONS = 0.3
_LAST_REPORT_SECONDS = 3.0
_SEEN_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Parameters
    ----------
    requests, rounds
        To each server, and turns in which they are sent.
    clients
        Requests at a time.
    seed
        Of what is asked.
    """

    requests: int
    rounds: int
    clients: int
    seed: int

    def parts(self) -> list[Round]:
        """The rounds, nothing answered yet."""
        everything = drifting_requests(self.requests, self.seed)
        edges = [self.requests * turn // self.rounds for turn in range(self.rounds + 1)]
        return [Round(everything[first:last]) for first, last in itertools.pairwise(edges)]

    def warm_up(self) -> list[Request]:
        """Requests that nobody scores."""
        return drifting_requests(self.clients, self.seed + 1)


def serve_both(setting: Setting, plan: Plan, folder: Path, console: Console) -> tuple[dict[str, Any], str]:
    """Run all rounds; returns the figures, and what `eplb status` prints at the end.

    Raises ``ServerError`` where a server does not start.
    """
    rounds = plan.parts()
    console.print("starting the service", highlight=False)
    with Service(folder, *_SERVICE_FLAGS) as service, watching(service) as watched:
        agent = {
            "EPLB_AGENT_SERVICE": service.address,
            "EPLB_AGENT_DEPLOYMENT": DEPLOYMENT,
            "EPLB_AGENT_DATA_HOST": "127.0.0.1",
        }
        with (
            Server(setting, folder / "alone.log", {}) as alone,
            Server(setting, folder / "balanced.log", agent) as balanced,
            live(console, rounds, watched.line) as screen,
        ):
            servers = {ALONE: alone, BALANCED: balanced}
            for kind, server in servers.items():
                screen.doing(f"vLLM starts, {kind}: {setting.ranks} ranks on CPU; about a minute")
                server.wait_until_ready()
            screen.doing("both compile what their first requests need")
            with watched.left_alone():
                for server in servers.values():
                    send_all(server.port, plan.warm_up(), plan.clients, lambda _: None)
            _take_turns(rounds, servers, plan.clients, screen)
            time.sleep(_LAST_REPORT_SECONDS)
            switches, printed = watched.switches(), watched.printed()
    return figures(rounds, switches, watched.balance()), printed


def _take_turns(rounds: Sequence[Round], servers: dict[str, Server], clients: int, screen: Screen) -> None:
    """Send each round to both servers, first to the one and then to the other, by turns."""
    for number, part in enumerate(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            screen.doing(f"round {number + 1} of {len(rounds)}: {part.phase}, {kind}")
            coming = part.answers[kind]
            part.answers[kind] = send_all(servers[kind].port, part.requests, clients, coming.append)
            part.complete.add(kind)
        screen.finished(part)


class Watched:
    """What the service says of the balanced deployment, asked for a few times a second."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._line = ""
        self._before = math.nan
        self._after: list[float] = []
        self._steps = 0

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Within it nothing is planned, and it ends once balance without a switch has been seen.

        On a busy machine the first layers would otherwise have switched before anybody asked.
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
                self._service.resume(DEPLOYMENT)

    def line(self) -> str:
        """The newest status in one line."""
        return self._line

    def balance(self) -> Balance:
        """The service's peak-to-average ratios so far."""
        return Balance(self._before, float(np.mean(self._after)) if self._after else math.nan, self._steps)

    def ask(self) -> None:
        """Take the newest status; none where no agent has come yet."""
        with contextlib.suppress(grpc.RpcError):
            self.take(self._service.status(DEPLOYMENT).status)

    def take(self, status: DeploymentStatus) -> None:
        """Take a status; one without new steps says nothing new of balance."""
        self._line = (
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

    def switches(self) -> Switches:
        """What was switched so far; none where no agent has come."""
        try:
            status = self._service.status(DEPLOYMENT).status
        except grpc.RpcError:
            return Switches(0, 0, 0, 0)
        return Switches(status.layers_switched, status.experts_moved, status.bytes_moved, status.steps_lost)

    def printed(self) -> str:
        """What ``eplb status`` prints."""
        command = [sys.executable, "-m", "eplb_service.cli.main", "status", DEPLOYMENT]
        done = subprocess.run(
            [*command, "--address", self._service.address], capture_output=True, text=True, check=False
        )
        return (done.stdout or done.stderr).rstrip()


@contextlib.contextmanager
def watching(service: Service) -> Iterator[Watched]:
    """The service's status, asked for on a thread while the context lasts."""
    watched, over = Watched(service), threading.Event()

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
