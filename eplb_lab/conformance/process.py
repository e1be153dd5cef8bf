"""Drive vLLM or SGLang in a process that runs the engine's own interpreter."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eplb_lab.conformance.engine import Answer, EngineError, Placement, Setup
from eplb_lab.conformance.inside import orders

ENTRY_POINTS = {
    "vllm": ("vllm.general_plugins", "eplb_lab.conformance.inside.vllm_plugin:register"),
    "sglang": ("sglang.srt.plugins", "eplb_lab.conformance.inside.sglang_plugin:register"),
}
"""Entry-point group and target of the kit's plugin, by engine."""
_PACKAGE = Path(__file__).parents[1]
_CAUSE = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception)(?:: .+|$)")
_WRAPPERS = ("initialization failed", "py-spy", "EngineDeadError", "See root cause", "SystemExit")
_STOP_SECONDS = 30.0
_LONGEST_REASON = 240
_MAX_INTERVALS = 40
_SETTLING_PROMPT = [[7, 5, 3]]


@dataclass(frozen=True)
class Options:
    """Options for starting engines of one kind.

    Parameters
    ----------
    engine
        ``vllm`` or ``sglang``.
    python
        Interpreter of the engine's environment.
    model
        Path or name of the model.
    ranks
        Number of tensor-parallel ranks, which are also the expert-parallel ranks.
    redundant
        Number of redundant slots.
    requests
        Maximum number of concurrent requests.
    quantisation
        Engine's name for the quantisation in the scenario with quantised experts.
    interval
        Steps between rearrangements.
    arguments
        Additional arguments for the engine's class.
    plugin_paths
        Folders to prepend to ``PYTHONPATH``.
    seconds
        Time limit for each call.
    """

    engine: str
    python: Path
    model: str
    ranks: int
    redundant: int
    requests: int = 8
    quantisation: str = "fp8"
    interval: int = 8
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin_paths: Sequence[Path] = ()
    seconds: float = 900.0


def make_site(folder: Path, engine: str) -> Path:
    """Create a folder for ``PYTHONPATH`` that contains only this package and the entry point of the kit's plugin."""
    site = folder / "site"
    metadata = site / "eplb_conformance-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: eplb-conformance\nVersion: 0\n")
    group, target = ENTRY_POINTS[engine]
    (metadata / "entry_points.txt").write_text(f"[{group}]\neplb_conformance = {target}\n")
    (site / _PACKAGE.name).symlink_to(_PACKAGE)
    return site


def search_path(site: Path, options: Options) -> str:
    """Return the ``PYTHONPATH`` of the engine's processes."""
    inherited = os.environ.get("PYTHONPATH")
    parts = [*map(str, options.plugin_paths), str(site), *([inherited] if inherited else [])]
    return os.pathsep.join(parts)


def cause_in(log: str) -> str:
    r"""Return the last error in a log that does not wrap another error, or the log's last line.

    Examples
    --------
    >>> cause_in("ValueError: no sleep mode\nRuntimeError: Engine core initialization failed")
    'ValueError: no sleep mode'
    """
    errors = [match.group() for line in log.splitlines() if (match := _CAUSE.search(line))]
    causes = [error for error in errors if not any(wrapper in error for wrapper in _WRAPPERS)]
    lines = log.strip().splitlines() or ["nothing was logged"]
    return textwrap.shorten((causes or errors or lines)[-1], _LONGEST_REASON, placeholder=" ...")


class ProcessEngine:
    """An engine in its own process. Its log and its orders are in one folder.

    Parameters
    ----------
    options
        Options of the engine.
    setup
        Options of the scenario.
    folder
        Folder to create.
    site
        Folder that ``make_site`` has created.

    Raises
    ------
    EngineError
        If the engine does not start.
    """

    def __init__(self, options: Options, setup: Setup, folder: Path, site: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._options = options
        self._log = folder / "engine.log"
        self._ordered = itertools.count(1)
        self._last_order = 0
        environment = {
            **os.environ,
            "PYTHONPATH": search_path(site, options),
            orders.FOLDER: str(folder),
            orders.CONTROL: setup.control or "",
        }
        calls_out, self._calls = os.pipe()
        self._replies, replies_in = os.pipe()
        host = f"eplb_lab.conformance.inside.{options.engine}_host"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [options.python, "-m", host, str(calls_out), str(replies_in)],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(calls_out, replies_in),
                start_new_session=True,
            )
        os.close(calls_out)
        os.close(replies_in)
        self._received = b""
        start = {
            "model": options.model,
            "ranks": options.ranks,
            "redundant": options.redundant,
            "requests": options.requests,
            "interval": options.interval,
            "quantisation": options.quantisation if setup.quantised else None,
            "sleeps": setup.sleeps,
            "engine": dict(options.arguments),
        }
        try:
            self._send(start)
            self._result()
            self._wait_for(0)
        except BaseException:
            self.close()
            raise

    def placement(self) -> Placement:
        """Return the placement at the last rearrangement."""
        return np.array(self._state()["placement"], dtype=np.int64)

    def order(self, placement: Placement) -> None:
        """Queue a placement for one of the next rearrangements."""
        self._last_order = next(self._ordered)
        orders.write_json(self._folder / orders.order_file(self._last_order), placement.tolist())

    def adopted(self) -> int:
        """Return the number of ordered placements that the engine has adopted."""
        return int(self._state()["adopted"])

    def settle(self) -> None:
        """Serve throwaway requests until the engine has adopted all ordered placements."""
        self._wait_for(self._last_order)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        """Answer all prompts concurrently."""
        answers = self._call("generate", prompts=[list(prompt) for prompt in prompts], tokens=tokens)
        return [Answer(tuple(ids), tuple(logprobs)) for ids, logprobs in answers]

    def sleep_and_wake(self) -> None:
        """Offload the weights, then restore them."""
        self._call("sleep_and_wake")

    def reload(self) -> None:
        """Load the weights from the checkpoint again."""
        self._call("reload")

    def close(self) -> None:
        """Stop the engine and all its processes."""
        if self._process.poll() is None:
            with contextlib.suppress(EngineError, OSError):
                self._call("close", limit=_STOP_SECONDS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        # The host leads its own session, which also contains its workers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._calls, self._replies):
            with contextlib.suppress(OSError):
                os.close(pipe)

    def _state(self) -> dict[str, Any]:
        path = self._folder / orders.STATE
        return dict(json.loads(path.read_text())) if path.exists() else {"adopted": -1, "skipped": 0}

    def _wait_for(self, adopted: int) -> None:
        """Serve throwaway requests until the engine has adopted this number of placements.

        The engine confirms a placement at the rearrangement after the one that adopted it.
        """
        allowed = _MAX_INTERVALS + 4 * max(0, adopted - self.adopted())
        for _ in range(allowed):
            state = self._state()
            if state["adopted"] >= adopted:
                return
            if state["skipped"]:
                raise EngineError(
                    f"instead of placement {state['skipped']}, the engine adopted a different one"
                )
            self.generate(_SETTLING_PROMPT, self._options.interval)
        raise EngineError(
            f"the engine's EPLB adopted {self.adopted()} of {adopted} placements in {allowed} intervals"
            if self.adopted() >= 0
            else f"the engine's EPLB did not decide within {allowed} intervals of {self._options.interval} steps"
        )

    def _call(self, method: str, limit: float | None = None, **arguments: Any) -> Any:
        self._send({"method": method, "arguments": arguments})
        return self._result(limit)

    def _send(self, value: Any) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._calls, line) :]
        except BrokenPipeError as error:
            raise self._gone() from error

    def _result(self, limit: float | None = None) -> Any:
        deadline = time.monotonic() + (limit or self._options.seconds)
        while b"\n" not in self._received:
            if time.monotonic() > deadline:
                raise EngineError(f"no reply within {limit or self._options.seconds:g} s; see {self._log}")
            if select.select([self._replies], [], [], 1.0)[0]:
                part = os.read(self._replies, 1 << 20)
                if not part:
                    raise self._gone()
                self._received += part
            elif self._process.poll() is not None:
                # Workers may keep the pipe open after their host has exited.
                raise self._gone()
        line, _, self._received = self._received.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(self._explained(reply["error"]))
        return reply["result"]

    def _explained(self, error: str) -> str:
        """Return the error, or the cause in the log if the error is only a wrapper."""
        if not any(wrapper in error for wrapper in _WRAPPERS):
            return textwrap.shorten(error, _LONGEST_REASON, placeholder=" ...")
        return cause_in(self._log.read_text(errors="replace"))

    def _gone(self) -> EngineError:
        return EngineError(f"the engine exited: {cause_in(self._log.read_text(errors='replace'))}")


def starter(options: Options, folder: Path) -> Any:
    """Return a function that starts engines, each in a new folder below ``folder``."""
    site = make_site(folder, options.engine)
    numbers = itertools.count(1)

    def start(setup: Setup) -> ProcessEngine:
        return ProcessEngine(options, setup, folder / f"engine-{next(numbers)}", site)

    return start


def write_tiny_model(options: Options, folder: Path) -> Path:
    """Write a small checkpoint with the ``transformers`` of the engine's environment, and return its folder.

    Raises
    ------
    EngineError
        If the checkpoint cannot be written in that environment.
    """
    site = make_site(folder / "writer", options.engine)
    model = folder / "model"
    command = [str(options.python), "-m", "eplb_lab.conformance.inside.tiny_model", str(model)]
    environment = {**os.environ, "PYTHONPATH": search_path(site, options)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"cannot write a small model here: {cause_in(done.stderr)}; pass --model")
    return model
