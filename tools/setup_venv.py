"""Install the project for development into the virtual environment that runs this file.

If ``--oldest`` is given, install only the tests' dependencies, in their oldest supported versions. The Makefile runs
this script once, and again whenever the dependencies change. On a machine without an accelerator, a CPU build of torch
is installed from PyTorch's own index or, if that is unreachable, from the configured index.
"""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent.resolve()
CONSTRAINTS = ROOT / "constraints-dev.txt"
OLDEST = ROOT / "constraints-oldest.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Install torch, then this repository with its extras in editable mode."""
    oldest = sys.argv[1:] == ["--oldest"]
    began = time.monotonic()
    print("setting up .venv: this takes a few minutes, mostly for downloads, and is done once", flush=True)
    pip("install", "--quiet", "--upgrade", "pip")
    if not installed("torch"):
        install_torch()
    print(
        f"installing eplb-service with its {'oldest test' if oldest else 'development'} dependencies",
        flush=True,
    )
    projects = (
        f"{ROOT}/packaging/eplb-core[planner,wire]",
        f"{ROOT}/packaging/eplb-agent",
        f"{ROOT}/packaging/eplb-lab[model]",
        f"{ROOT}[{'test' if oldest else 'dev'}]",
    )
    editable = [argument for project in projects for argument in ("--editable", project)]
    pip("install", "--quiet", "--constraint", str(OLDEST if oldest else CONSTRAINTS), *editable)
    print(f".venv is ready; the setup took {duration(time.monotonic() - began)}", flush=True)


def duration(seconds: float) -> str:
    """Return a duration as text.

    Examples
    --------
    >>> duration(42.0), duration(150.0)
    ('42 s', '2 minutes')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def install_torch() -> None:
    """Install the pinned torch. On a machine without an accelerator, avoid gigabytes of CUDA libraries."""
    quietly = ("install", "--quiet", torch_requirement())
    if accelerator() or platform.system() != "Linux":
        print("installing torch (once; this takes a few minutes)", flush=True)
        pip(*quietly)
        return
    print(
        "installing a CPU build of torch, because no accelerator was found (once; this takes a minute or two)",
        flush=True,
    )
    # If PyTorch's own index is unreachable, the configured index may still have a build.
    if attempt_pip(*quietly, "--retries", "1", "--index-url", CPU_INDEX).returncode != 0:
        print(
            f"{CPU_INDEX} has no such build or is unreachable; using the configured index instead", flush=True
        )
        pip(*quietly)


def torch_requirement() -> str:
    """Return the requirement specifier for the pinned torch."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def accelerator() -> bool:
    """Return True if the command-line tools for an NVIDIA GPU or an Ascend NPU are installed."""
    return any(shutil.which(tool) for tool in ("nvidia-smi", "npu-smi"))


def installed(package: str) -> bool:
    """Return True if this environment contains the package."""
    command = [sys.executable, "-m", "pip", "show", "--quiet", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def pip(*arguments: str) -> None:
    """Run pip. If it fails, print its output and exit."""
    done = attempt_pip(*arguments)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nsetup failed; see pip's message above")


def attempt_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip and return the completed process, even if pip fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


if __name__ == "__main__":
    main()
