"""Every module is reachable from an entry point, a command, or the documented API."""

import ast
import re
from pathlib import Path

import pytest

from eplb_service.cli.main import COMMANDS

tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")

ROOT = Path(__file__).parents[1]
IMPORTED_BY_ENGINES = {f"worker_agent.policy.connectors.{name}" for name in ("mlb", "vllm_49700")}
"""Modules that the user names in an engine's configuration."""
PROJECTS = ("pyproject.toml", "packaging/eplb-agent/pyproject.toml", "packaging/eplb-lab/pyproject.toml")


def modules() -> dict[str, ast.Module]:
    """Return the packages' modules that contain code, by name."""
    trees = {}
    for package in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if "generated" not in path.parts and len(tree.body) > 1:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                trees[name.removesuffix(".__init__")] = tree
    return trees


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a module imports, and its strings that may name modules to start or import later."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value, node.value.partition(":")[0]}
    return names


def entries(sources: dict[str, ast.Module]) -> set[str]:
    declared = [tomllib.loads((ROOT / name).read_text())["project"] for name in PROJECTS]
    targets = [
        target
        for project in declared
        for table in (project.get("scripts", {}), *project.get("entry-points", {}).values())
        for target in table.values()
    ]
    run = [name for name, tree in sources.items() if "__main__" in name + ast.unparse(tree)]
    page = (ROOT / "docs/reference/api.md").read_text()
    documented = re.findall(r"^::: ([\w.]+)\.\w+$", page, flags=re.MULTILINE)
    commands = {f"eplb_service.cli.{module}" for module, _, _ in COMMANDS.values()}
    return {target.partition(":")[0] for target in targets} | {*run, *documented} | commands


def test_every_module_is_reachable() -> None:
    sources = modules()
    reached = set()
    ahead = entries(sources)
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead |= {name.rpartition(".")[0]} | (names_in(sources[name]) if name in sources else set())
    assert len(sources) > 100
    assert sources.keys() - reached == IMPORTED_BY_ENGINES
