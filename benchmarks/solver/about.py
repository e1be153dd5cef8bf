"""What has to be said beside a figure for it to mean something: the command, the machine, the versions."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def about(seeds: tuple[int, ...]) -> dict[str, str]:
    """Command, processor, cores and versions, as text."""
    packages = ("numpy", "numba", "torch")
    return {
        "command": " ".join(["python -m benchmarks.solver", *sys.argv[1:]]),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
        ),
        "seeds": ", ".join(map(str, seeds)),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
