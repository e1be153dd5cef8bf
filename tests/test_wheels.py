"""Four wheels, each with one package: no overlap, and only the requirements that each user needs."""

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
# An image's build context contains only these files, and they suffice to build all wheels.
SOURCES = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
NOT_SOURCES = shutil.ignore_patterns("build", "__pycache__", "*.egg-info", "*_pb2*")
PACKAGES = {
    "eplb_agent": "worker_agent",
    "eplb_core": "eplb_core",
    "eplb_lab": "eplb_lab",
    "eplb_service": "eplb_service",
}
"""Package in each wheel, by distribution name."""
IMPORT_AGENT = """
import importlib, pkgutil, sys, worker_agent
# These need the extra ``policy`` or the engine itself.
skipped = tuple(f"worker_agent.policy.{name}" for name in ("decide", "connectors.", "vllm_ascend."))
for module in pkgutil.walk_packages(worker_agent.__path__, "worker_agent."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
print(len(sys.modules))
"""
NOT_IN_AN_ENGINE = ("llvmlite", "numba", "prometheus_client", "rich", "structlog", "typer", "zarr")
"""Packages that no inference container needs."""
NOT_IN_THE_BASE = (*NOT_IN_AN_ENGINE, "google", "grpc", "pydantic", "torch", "xxhash")
"""Packages that the core does not need without extras."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build all wheels. The service's wheel is built from its source archive."""
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
    projects = [str(sources / "packaging" / name) for name in ("eplb-core", "eplb-agent", "eplb-lab")]
    subprocess.run([*command, *projects, str(archive)], check=True)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def python(program: str, folder: Path, absent: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a program with the wheels unpacked in ``folder`` and this environment's packages, except ``absent``."""
    torch = find_spec("torch")
    assert torch is not None
    site = str(Path(str(torch.origin)).parents[1])
    # The option -S disables ``site``, so no editable install is on the path.
    start = f"import sys; sys.path[:0] = [{str(folder)!r}]; sys.path.append({site!r})\n"
    start += f"sys.modules.update(dict.fromkeys({absent}))\n"
    command = [sys.executable, "-I", "-S", "-c", start + program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_wheel_contains_exactly_one_package(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == PACKAGES.keys()
    for wheel, package in PACKAGES.items():
        names = files(wheels[wheel])
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert sources <= names
        assert f"{package}/py.typed" in names
        assert {name.partition("/")[0] for name in names} == {package}
    assert "eplb_core/wire/generated/agent_pb2.pyi" in files(wheels["eplb_core"])
    model = {f"eplb_lab/model/byte-moe/{path.name}" for path in (ROOT / "eplb_lab/model/byte-moe").iterdir()}
    assert model <= files(wheels["eplb_lab"])


def test_an_inference_container_downloads_less_than_a_megabyte(wheels: dict[str, Path]) -> None:
    assert wheels["eplb_agent"].stat().st_size + wheels["eplb_core"].stat().st_size < 1_000_000


def test_the_agent_runs_with_the_core_and_the_engines_torch(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name in ("eplb_agent", "eplb_core"):
        zipfile.ZipFile(wheels[name]).extractall(tmp_path)
    imported = python(IMPORT_AGENT, tmp_path, NOT_IN_AN_ENGINE)
    assert imported.returncode == 0, imported.stderr
    assert int(imported.stdout) > 100


def test_the_base_core_needs_only_numpy(wheels: dict[str, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels["eplb_core"]).extractall(tmp_path)
    imported = python("import eplb_core.placement, eplb_core.heat.window", tmp_path, NOT_IN_THE_BASE)
    assert imported.returncode == 0, imported.stderr
