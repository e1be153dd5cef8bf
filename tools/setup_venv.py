"""Install the project for development into the virtual environment that runs this file.

Called by the Makefile, once; again only when the dependencies change. Where no accelerator is present, torch is taken
as a CPU build: from the configured index where that offers one, otherwise from PyTorch's own index of CPU builds.
"""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.resolve()
CONSTRAINTS = ROOT / "constraints-dev.txt"
AGENT = ROOT / "packaging" / "eplb-agent"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    """Install torch, then both distributions of this repository with their extras, editable."""
    pip("install", "--quiet", "--upgrade", "pip")
    if not installed("torch"):
        pip("install", "--quiet", torch_requirement(), *torch_options())
    print("installing eplb-service and its development tools", flush=True)
    editable = ["--editable", f"{AGENT}[model]", "--editable", f"{ROOT}[agent,dev]"]
    pip("install", "--quiet", "--constraint", str(CONSTRAINTS), *editable)


def torch_requirement() -> str:
    """The pinned torch."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def torch_options() -> list[str]:
    """Where to take torch from: no gigabytes of CUDA on a machine without an accelerator."""
    if accelerator() or platform.system() != "Linux":
        print("installing torch (once; this takes a few minutes)", flush=True)
        return []
    print(
        "installing a CPU build of torch, as no accelerator was found (once; takes a minute or two)",
        flush=True,
    )
    return [] if index_offers_cpu_build() else ["--index-url", CPU_INDEX]


def accelerator() -> bool:
    """Whether the tools of an NVIDIA GPU or an Ascend NPU are there."""
    return any(shutil.which(tool) for tool in ("nvidia-smi", "npu-smi"))


def index_offers_cpu_build() -> bool:
    """Whether the index that pip is configured with would hand out a CPU build of the pinned torch."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-"]
    answer = subprocess.run([*command, torch_requirement()], capture_output=True, text=True, check=False)
    try:
        version: str = json.loads(answer.stdout)["install"][0]["metadata"]["version"]
    except (ValueError, LookupError):
        return False
    return version.endswith("+cpu")


def installed(package: str) -> bool:
    """Whether this environment has the package."""
    command = [sys.executable, "-m", "pip", "show", "--quiet", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def pip(*arguments: str) -> None:
    """Run pip; where it fails, shows what it said and ends the program."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nset-up failed; pip's message is above")


if __name__ == "__main__":
    main()
