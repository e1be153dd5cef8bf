"""Two wheels, no file in both: an inference container installs the agent without solver, command line or torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
# All that an image's build sees is enough to build both.
SOURCES = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
NOT_SOURCES = shutil.ignore_patterns("build", "__pycache__", "*.egg-info", "*_pb2*")
# Everything that a rank runs; the demo's model needs safetensors besides (eplb-agent[model]).
IMPORT_ALL = """
import importlib, pkgutil, sys, worker_agent
for found in pkgutil.walk_packages(worker_agent.__path__, "worker_agent."):
    if not found.name.startswith(("worker_agent.model", "worker_agent.demo")):
        importlib.import_module(found.name)
import worker_agent.agent
print(len(sys.modules))
"""


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels by the name of their distribution, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = folder / "sources"
    for name in SOURCES:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=NOT_SOURCES)
        else:
            shutil.copy(ROOT / name, sources / name)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
    run(sys.executable, *build, sources / "packaging" / "eplb-agent", sources)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_no_file_is_in_two_wheels_and_none_is_missing(wheels: dict[str, Path]) -> None:
    agent, service = files(wheels["eplb_agent"]), files(wheels["eplb_service"])
    assert not agent & service
    packages = ("eplb_service", "worker_agent")
    sources = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")}
    assert sources <= agent | service
    assert {"eplb_service/__init__.py", "eplb_service/py.typed", "worker_agent/py.typed"} <= agent
    assert "eplb_service/wire/generated/agent_pb2.pyi" in agent


def test_the_agent_alone_imports_in_an_empty_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheels["eplb_agent"])
    installed = {line.partition("==")[0].lower() for line in run(python, "-m", "pip", "freeze").splitlines()}
    forbidden = {
        "llvmlite",
        "matplotlib",
        "numba",
        "prometheus-client",
        "rich",
        "scipy",
        "structlog",
        "torch",
        "typer",
    }
    assert not installed & forbidden
    # The host brings torch: here it is this environment's, with what torch itself requires and nothing else.
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for package in torch_and_its_requirements():
        link(package, purelib)
    assert int(run(python, "-I", "-c", IMPORT_ALL)) > 100
    refused = subprocess.run(
        [python, "-I", "-c", "from eplb_service import solve"], capture_output=True, text=True, check=False
    )
    assert "only eplb-agent is installed: pip install eplb-service" in refused.stderr


def torch_and_its_requirements() -> list[str]:
    """Names of the distributions that torch brings."""
    found, ahead = [], ["torch"]
    while ahead:
        name = ahead.pop()
        found.append(name)
        for line in requires(name) or []:
            requirement = line.partition(";")[0].strip()
            other = "".join(
                character if character.isalnum() or character in "-_." else " " for character in requirement
            )
            if ";" not in line and other.split()[0] not in found:
                ahead.append(other.split()[0])
    return found


def link(package: str, purelib: Path) -> None:
    """Put the packages of a distribution of this environment into another one."""
    here = distribution(package)
    for top in {path.parts[0] for path in here.files or [] if path.parts[0] != ".."}:
        place = Path(str(here.locate_file(top)))
        if not (purelib / top).exists() and place.exists() and not top.startswith("__"):
            (purelib / top).symlink_to(place)
