"""One real vLLM OpenAI server on CPU that serves the embedded model expert-parallel, with or without the agent."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.e2e.service import free_address
from tests.engines.conftest import engine_environment
from tests.engines.processes import end_engine, start_engine
from worker_agent.model.checkpoint import EMBEDDED

_START_SECONDS = 900.0
_NEVER = 10**9


class ServerError(RuntimeError):
    """A server that does not start; the message has the end of its log."""


@dataclass(frozen=True)
class Setting:
    """How a server is started.

    Parameters
    ----------
    python
        Interpreter of vLLM's environment.
    site
        For ``PYTHONPATH``, from ``make_agent_site``.
    ranks, redundant
        Tensor-parallel ranks that share the experts, and slots per layer beyond one per expert.
    sequences
        Requests served at a time.
    """

    python: Path
    site: Path
    ranks: int
    redundant: int
    sequences: int

    def command(self, port: int) -> list[str]:
        """The engine's own command line; its own balancer never comes to act."""
        eplb = {"num_redundant_experts": self.redundant, "use_async": False, "step_interval": _NEVER}
        options = {
            "--model": str(EMBEDDED),
            "--served-model-name": "byte-moe",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--max-num-seqs": str(self.sequences),
            "--tensor-parallel-size": str(self.ranks),
            "--eplb-config": json.dumps(eplb),
        }
        flags = ["--enforce-eager", "--enable-expert-parallel", "--enable-eplb", "--no-enable-prefix-caching"]
        arguments = [part for option in options.items() for part in option]
        return [str(self.python), "-m", "vllm.entrypoints.openai.api_server", *arguments, *flags]

    def environment(self, agent: dict[str, str]) -> dict[str, str]:
        """Of the process; ``agent`` holds the agent's variables, none to leave it alone."""
        on_cpu = engine_environment(self.site, VLLM_NO_USAGE_STATS="1")
        return {name: value for name, value in on_cpu.items() if not name.startswith("EPLB_")} | agent


class Server:
    """The process, from entering the context to leaving it.

    Parameters
    ----------
    setting
        How it is started.
    log
        File that takes what it prints.
    agent
        ``EPLB_AGENT_*`` variables; empty for vLLM alone.
    """

    def __init__(self, setting: Setting, log: Path, agent: dict[str, str]) -> None:
        self.port = int(free_address().rpartition(":")[2])
        self._setting, self._log, self._agent = setting, log, agent
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._process = start_engine(
            self._setting.command(self.port), self._setting.environment(self._agent), self._log
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        end_engine(self._process)

    def wait_until_ready(self) -> None:
        """Until it takes requests; raises ``ServerError`` where it ends, or does not in minutes."""
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not self._healthy():
            if self._process.poll() is not None:
                raise ServerError(f"vLLM ended while it started, see {self._log}: {self.last_output()}")
            if time.monotonic() > deadline:
                raise ServerError(f"vLLM did not start in {_START_SECONDS:.0f} s: {self.last_output()}")
            time.sleep(0.5)

    def last_output(self, characters: int = 2000) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-characters:].strip()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
