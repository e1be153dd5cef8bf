"""Tests of the packaging metadata: versions, command, typing, and dependencies that match the imports."""

import ast
import fcntl
import importlib
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import eplb_service
from eplb_core.extras import install_command
from tools.pythons.__main__ import SERVICE_FROM, VERSIONS
from tools.pythons.extras import EXTRAS

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "eplb_core": "packaging/eplb-core",
    "eplb_lab": "packaging/eplb-lab",
    "eplb_service": "",
    "worker_agent": "packaging/eplb-agent",
}
PROJECTS = {
    package: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for package, folder in PACKAGES.items()
}
CORE = PROJECTS["eplb_core"]
LAB = PROJECTS["eplb_lab"]
SERVICE = PROJECTS["eplb_service"]
AGENT = PROJECTS["worker_agent"]
FOUND_IN_PLACE = {"torch", "torch_npu", "triton", "vllm", "vllm_ascend", "sglang"}
"""Packages that an inference engine provides. They are never requirements."""
ONLINE_ONLY = {"google.protobuf", "grpc", "pydantic"}
"""Packages that the wire format and curve files need, but offline decisions do not."""
IMPORT_NAMES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "helm-python-sdk": "helm_python",
    "kubernetes-validate": "kubernetes_validate",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pydantic-settings": "pydantic_settings",
    "pyyaml": "yaml",
}


def declared(requirements):
    names = [re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements]
    return {IMPORT_NAMES.get(name, name) for name in names}


def imported(*paths):
    packages = set()
    for package_path in paths:
        for path in (
            [ROOT / package_path] if package_path.endswith(".py") else (ROOT / package_path).rglob("*.py")
        ):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    packages |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    packages.add(node.module.partition(".")[0])
    return packages - set(sys.stdlib_module_names) - PACKAGES.keys()


def run_python(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_distributions_have_the_same_version():
    assert {project["version"] for project in PROJECTS.values()} == {eplb_service.__version__}


def test_distributions_require_each_other_at_the_same_version():
    requirements = [
        line
        for project in PROJECTS.values()
        for lines in [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        for line in lines
        if line.startswith("eplb-") and "==" in line
    ]
    assert len(requirements) >= 4
    assert {line.partition("==")[2] for line in requirements} == {eplb_service.__version__}


def test_make_pythons_installs_each_extra():
    extras = set(SERVICE["optional-dependencies"]) - {"test", "docs", "dev"}
    assert set(EXTRAS) == extras | set(LAB["optional-dependencies"]) | set(AGENT["optional-dependencies"])


def test_make_pythons_covers_the_declared_versions():
    assert AGENT["requires-python"] == f">={VERSIONS[0]}"
    assert SERVICE["requires-python"] == ">={}.{}".format(*SERVICE_FROM)


def test_messages_name_published_packages():
    named = set()
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        text = path.read_text()
        assert "eplb-service[" not in text, path
        calls = re.findall(r"install_command\(['\"](\w+)['\"](?:, ['\"]([\w-]+)['\"])?\)", text)
        named |= {(extra, distribution or "eplb-service") for extra, distribution in calls}
        named |= {(extra, "eplb-service") for extra in re.findall(r'require\(.*"(\w+)"\)', text)}
    assert {extra for extra, _ in named} >= {"checkpoint", "kubernetes", "model", "peers", "ray", "tables"}
    projects = {project["name"]: project for project in PROJECTS.values()}
    for extra, distribution in named:
        requirements = projects[distribution]["optional-dependencies"][extra]
        assert not [line for line in requirements if line.startswith("eplb")], extra


def test_the_command_that_installs_an_extra_names_its_packages(monkeypatch):
    declared = ['ray>=2.30; extra == "ray"', 'a; extra == "two"', "b[c]>1 ; extra == 'two'", "numpy>=1.26"]
    monkeypatch.setattr(metadata, "requires", lambda _: declared)
    assert install_command("ray") == "pip install 'ray>=2.30'"
    assert install_command("two") == "pip install a 'b[c]>1'"
    assert "'three' extra" in install_command("three")


def test_the_command_exists_and_packages_are_typed():
    module, _, function = SERVICE["scripts"]["eplb"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_the_service_declares_exactly_its_imports():
    extras = SERVICE["optional-dependencies"]
    declares = declared(SERVICE["dependencies"]) - {"eplb-core"}
    for name in ("kubernetes", "ray", "safetensors", "tables", "torch"):
        declares |= declared(extras[name])
    assert imported("eplb_service") == declares


def test_the_core_declares_exactly_its_imports():
    extras = [declared(extra) for extra in CORE["optional-dependencies"].values()]
    # pyarrow reads measured tables. An extra of eplb-service requires it.
    assert imported("eplb_core") - {"pyarrow"} == declared(CORE["dependencies"]).union(*extras)


def test_the_agent_declares_exactly_its_imports():
    declares = declared(AGENT["dependencies"]) - {"eplb-core"}
    assert imported("worker_agent") - FOUND_IN_PLACE == declares


def test_the_lab_declares_its_imports():
    extras = [declared(extra) for extra in LAB["optional-dependencies"].values()]
    services = declared(SERVICE["dependencies"])
    declares = declared(LAB["dependencies"]).union(*extras) | services | {"pydantic", "google", "grpc"}
    assert imported("eplb_lab") - FOUND_IN_PLACE - {"torch_npu"} <= declares | {"torch"}


def test_every_declared_test_requirement_is_used():
    loaded_by_pytest = {"pytest-asyncio", "pytest-timeout", "pytest-xdist"} | {
        "helm_python",
        "safetensors",
    }  # loaded with pytest.importorskip
    assert declared(SERVICE["optional-dependencies"]["test"]) - loaded_by_pytest <= imported("tests")


def test_every_class_variable_has_a_type():
    """Python 3.10 cannot resolve the hints of a class with an untyped ``ClassVar``."""
    untyped = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("ClassVar")
    ]
    assert untyped == []


def test_the_base_install_does_not_need_torch():
    probe = (
        "import sys; sys.modules['torch'] = None\n"
        "from eplb_service import solve\n"
        "from eplb_service.cli.main import COMMANDS\n"
        "from eplb_service.cli.main import load_command\n"
        "import eplb_service.control.server\n"
        "for name in COMMANDS.keys() - {'demo'}: load_command(name)\n"
    )
    run_python(probe)


def test_solve_loads_neither_protobuf_nor_grpc_nor_pydantic():
    program = (
        "import sys\n"
        "import numpy as np\n"
        "from eplb_service import solve\n"
        "solution = solve(np.random.default_rng(0).poisson(20, (16, 1, 4)), ranks=2, slots=3)\n"
        "assert solution.phy2log.shape == (1, 2, 3)\n"
        f"print(sorted({ONLINE_ONLY} & sys.modules.keys()))\n"
    )
    assert run_python(program) == "[]\n"


def test_the_planner_imports_without_the_wire_extra():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({ONLINE_ONLY}))\n"
    run_python(blocked + "import eplb_core.planner.decide, eplb_core.planner.counterfactual\n")


def test_a_tree_is_built_by_one_process_at_a_time(monkeypatch):
    folder = ROOT / "packaging/eplb-agent"
    builds = []

    def build(**_):
        with (folder / "pyproject.toml").open() as tree, pytest.raises(BlockingIOError):
            fcntl.flock(tree, fcntl.LOCK_EX | fcntl.LOCK_NB)
        builds.append(folder)

    monkeypatch.setattr("setuptools.setup", build)
    runpy.run_path(str(folder / "setup.py"), run_name="__main__")
    assert builds == [folder]
