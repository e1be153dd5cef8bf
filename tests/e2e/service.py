"""A real `eplb serve` process for tests, and operator RPCs to it."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eplb_core.wire.generated import operator_pb2, operator_pb2_grpc

_START_SECONDS = 300.0


def free_address() -> str:
    """Return a free host:port outside the range of ephemeral ports, so that it stays free while a service is down."""
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    below = int(given_out.read_text().split()[0]) if given_out.exists() else 32768
    # Tests in other processes must not choose the same ports.
    for port in random.SystemRandom().sample(range(10_000, below), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise AssertionError(f"none of 100 ports from 10000 to {below} was free")


class Service:
    """The service process. A test can start and stop it repeatedly, always at the same address."""

    def __init__(self, folder: Path, *flags: str, address: str | None = None) -> None:
        self.address = address or free_address()
        self.metrics_address = free_address()
        self._flags = [*flags, "--listen", self.address, "--metrics", self.metrics_address]
        self.log = folder / "service.log"
        self._log = self.log.open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(self.address)
        self._operator = operator_pb2_grpc.OperatorServiceStub(self._channel)

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.close()
        self._log.close()

    def start(self) -> None:
        """Start the service and wait until it can make decisions. The solver may have to be compiled first."""
        command = [sys.executable, "-m", "eplb_service.cli.main", "serve", *self._flags]
        # Linux divides a busy machine's CPU time between sessions. In its own session, the service gets a full
        # share instead of sharing one with all test processes.
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._serves():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                self.kill()
                ended = (
                    f"ended with {status}" if status is not None else f"not ready after {_START_SECONDS:g} s"
                )
                raise AssertionError(f"{' '.join(command)} {ended}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def _serves(self) -> bool:
        # Use a new channel, because one that has failed to connect backs off for longer and longer.
        with grpc.insecure_channel(self.address) as channel, contextlib.suppress(grpc.RpcError):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def kill(self) -> None:
        """Kill the process without a clean shutdown, as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self, seconds: float) -> None:
        """Kill the service and start it again after ``seconds``."""
        self.kill()
        time.sleep(seconds)
        self.start()

    def freeze(self, seconds: float) -> None:
        """Suspend the process for ``seconds``. It neither reads nor writes, but its connections stay open."""
        self._signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(signal.SIGCONT)

    def ended(self) -> int:
        """Terminate the service and return its exit code."""
        self._process.terminate()
        return self._process.wait(_START_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a metric that have these labels."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        pairs = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(pair in line for pair in pairs))

    def status(self, deployment: str = "default") -> operator_pb2.GetStatusResponse:
        """Return the status that an operator sees. Raises ``grpc.RpcError``."""
        request = operator_pb2.GetStatusRequest(deployment=deployment)
        response: operator_pb2.GetStatusResponse = self._operator.GetStatus(
            request, wait_for_ready=True, timeout=60
        )
        return response

    def pause(self, deployment: str) -> None:
        """Stop making plans for the deployment. Raises ``grpc.RpcError`` if no agent has connected yet."""
        self._operator.Pause(operator_pb2.PauseRequest(deployment=deployment), timeout=20)

    def resume(self, deployment: str) -> None:
        """Resume planning."""
        self._operator.Resume(operator_pb2.ResumeRequest(deployment=deployment), timeout=20)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_until(
        self, true_of: Callable[[operator_pb2.GetStatusResponse], bool], seconds: float = 180.0
    ) -> operator_pb2.GetStatusResponse:
        """Return the first status that satisfies ``true_of``. Fail with the last status after ``seconds``."""
        deadline = time.monotonic() + seconds
        seen: object = "no status"
        while time.monotonic() < deadline:
            try:
                status = self.status()
                if true_of(status):
                    return status
                seen = status
            except grpc.RpcError as error:
                seen = error
            time.sleep(0.1)
        raise AssertionError(f"the condition was not met within {seconds:g} s; last status: {seen}")
