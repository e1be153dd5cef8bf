"""What is installed is what pyproject.toml says: version, command, typing, and no import that nothing declares."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eplb_service

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pydantic-settings": "pydantic_settings",
    "pyyaml": "yaml",
}


def declared(requirements):
    names = [re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements]
    return {IMPORT_NAMES.get(name, name) for name in names}


def imported(package):
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"eplb_service", "worker_agent"}


def test_version_is_one():
    assert PROJECT["version"] == eplb_service.__version__


def test_the_command_exists():
    module, _, function = PROJECT["scripts"]["eplb"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("package", ["eplb_service", "worker_agent"])
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_imports_and_declared_dependencies_are_the_same():
    base, extras = declared(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert imported("eplb_service") == base | declared(extras["ray"]) | declared(extras["report"])
    # torch_npu is never a requirement: it is there where the device is an NPU.
    assert imported("worker_agent") - {"torch_npu"} - base == declared(extras["agent"])


def test_test_dependencies_are_used():
    loaded_by_pytest = {"pytest-asyncio", "pytest-timeout", "pytest-xdist"} | {"zarr"}  # importorskip("zarr")
    assert declared(PROJECT["optional-dependencies"]["test"]) - loaded_by_pytest <= imported("tests")


def test_the_base_install_needs_no_torch():
    probe = (
        "import sys; sys.modules['torch'] = None\n"
        "from eplb_service import solve\n"
        "from eplb_service.cli.main import COMMANDS, load_command\n"
        "import eplb_service.control.server.service\n"
        "for name in COMMANDS.keys() - {'demo'}: load_command(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
