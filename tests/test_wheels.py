"""Two wheels: eplb-service is complete; eplb-agent is its part for inference containers, without the solver."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
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


FORBIDDEN = ("llvmlite", "numba", "prometheus_client", "rich", "structlog", "typer", "zarr")
"""Packages that no inference container needs."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels by the name of their distribution; that of the service is built from its own sdist."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = folder / "sources"
    for name in SOURCES:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=NOT_SOURCES)
        else:
            shutil.copy(ROOT / name, sources / name)
    sdist = [sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), str(sources)]
    subprocess.run(sdist, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(sources / "packaging" / "eplb-agent"), str(archive)], check=True)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def content(wheel: Path, name: str) -> bytes:
    return zipfile.ZipFile(wheel).read(name)


def test_the_service_is_complete_and_the_agent_is_a_part_of_it(wheels: dict[str, Path]) -> None:
    agent, service = files(wheels["eplb_agent"]), files(wheels["eplb_service"])
    assert agent < service
    for name in agent:
        assert content(wheels["eplb_agent"], name) == content(wheels["eplb_service"], name), name
    packages = ("eplb_service", "worker_agent")
    sources = {path.relative_to(ROOT).as_posix() for name in packages for path in (ROOT / name).rglob("*.py")}
    assert sources <= service
    assert {"eplb_service/__init__.py", "eplb_service/py.typed", "worker_agent/py.typed"} <= agent
    assert "eplb_service/wire/generated/agent_pb2.pyi" in agent
    model = {
        f"worker_agent/model/byte-moe/{path.name}"
        for path in (ROOT / "worker_agent/model/byte-moe").iterdir()
    }
    assert model <= service - agent
    assert wheels["eplb_agent"].stat().st_size < 1_000_000, "what inference containers fetch"


def test_the_agent_alone_imports_beside_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels["eplb_agent"]).extractall(tmp_path)
    torch = find_spec("torch")
    assert torch is not None
    site = str(Path(str(torch.origin)).parents[1])

    def python(program: str) -> subprocess.CompletedProcess[str]:
        # Without ``site`` no editable install is on the path.
        start = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({site!r})\n"
        start += f"sys.modules.update(dict.fromkeys({FORBIDDEN}))\n"
        command = [sys.executable, "-I", "-S", "-c", start + program]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    imported = python(IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr
    assert int(imported.stdout) > 100
    assert (
        "only eplb-agent is installed here; install the wheel of eplb-service instead"
        in python("from eplb_service import solve").stderr
    )
