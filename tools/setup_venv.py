"""Install the project into the virtual environment that runs this file, for development.

With ``--oldest``: for its tests, on the oldest dependencies that it allows.
Called by the Makefile, once; again only when the dependencies change. Where no accelerator is present, torch is taken
as a CPU build from PyTorch's own index; where that cannot be reached, torch is whatever the configured index has.
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
    """Install torch, then this repository with its extras, editable."""
    oldest = sys.argv[1:] == ["--oldest"]
    began = time.monotonic()
    print("setting up .venv: this takes a few minutes, mostly for downloads, and is done once", flush=True)
    pip("install", "--quiet", "--upgrade", "pip")
    if not installed("torch"):
        install_torch()
    print(
        f"installing eplb-service and its {'tests, on the oldest' if oldest else 'development'} dependencies",
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
    print(f".venv is set up; that took {duration(time.monotonic() - began)}", flush=True)


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def install_torch() -> None:
    """Install the pinned torch, without gigabytes of CUDA on a machine that has no accelerator."""
    quietly = ("install", "--quiet", torch_requirement())
    if accelerator() or platform.system() != "Linux":
        print("installing torch (once; this takes a few minutes)", flush=True)
        pip(*quietly)
        return
    print(
        "installing a CPU build of torch, as no accelerator was found (once; takes a minute or two)",
        flush=True,
    )
    # The configured index may offer the CPU build as well, where PyTorch's own is out of reach.
    if attempt_pip(*quietly, "--retries", "1", "--index-url", CPU_INDEX).returncode != 0:
        print(
            f"{CPU_INDEX} has no such build or cannot be reached: taking the configured index's", flush=True
        )
        pip(*quietly)


def torch_requirement() -> str:
    """The pinned torch."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def accelerator() -> bool:
    """Whether the tools of an NVIDIA GPU or an Ascend NPU are there."""
    return any(shutil.which(tool) for tool in ("nvidia-smi", "npu-smi"))


def installed(package: str) -> bool:
    """Whether this environment has the package."""
    command = [sys.executable, "-m", "pip", "show", "--quiet", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def pip(*arguments: str) -> None:
    """Run pip; where it fails, shows what it said and ends the program."""
    done = attempt_pip(*arguments)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nset-up failed; pip's message is above")


def attempt_pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip, whatever comes of it."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


if __name__ == "__main__":
    main()
