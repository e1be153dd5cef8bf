"""Fingerprints of the engine functions that an adapter relies on, from the engines' sources.

``make known-engines`` records every version in ``engine_sources.VERSIONS`` in the adapters' ``known.json`` and prints
the changes between successive versions. Read the changes before you add a version. To record further functions,
add ``ARGS="--engine vllm TARGET ..."``. The engines need not be installed. The fingerprints are identical to the ones
that ``worker_agent.adapters.compat.fingerprint`` computes for an installed engine.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Mapping
from pathlib import Path

from tools.engine_sources import VERSIONS, source_of
from worker_agent.adapters import compat
from worker_agent.adapters.compat import Function, fingerprint_of_tree, release_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def find(folder: Path, target: str) -> Function | None:
    """Return the function at ``module:qualified.name`` in the package in ``folder``, or ``None`` if it is missing."""
    module, _, name = target.partition(":")
    path = folder.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return None
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for identifier in name.split("."):
        matches = [child for child in _definitions(node) if child.name == identifier]
        if not matches:
            return None
        node = matches[-1]
    if not isinstance(node, _FUNCTIONS):
        return None
    return Function(_parameters(node), fingerprint_of_tree(ast.Module(body=[node], type_ignores=[])))


def moved(folder: Path, functions: dict[str, Function]) -> dict[str, str]:
    """Return the differences between the package in ``folder`` and ``functions``, keyed by target."""
    return _differences(functions, {target: find(folder, target) for target in functions})


def _differences(old: dict[str, Function], new: Mapping[str, Function | None]) -> dict[str, str]:
    differences = {}
    for target, before in old.items():
        now = new.get(target)
        if now is None:
            differences[target] = "is missing"
        elif now.parameters != before.parameters:
            differences[target] = f"takes ({', '.join(now.parameters)})"
        elif now.source != before.source:
            differences[target] = "has a different body"
    return differences


def _definitions(node: ast.AST) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the classes and functions defined directly in ``node``, including those under ``if`` and ``try``."""
    definitions: list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *_FUNCTIONS)):
            definitions.append(child)
        elif isinstance(child, (ast.If, ast.Try)):
            definitions += _definitions(child)
    return definitions


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    spec = function.args
    names = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
    names += [spec.vararg.arg] if spec.vararg else []
    names += [argument.arg for argument in spec.kwonlyargs]
    names += [spec.kwarg.arg] if spec.kwarg else []
    return tuple(names)


def main() -> None:
    """Record the functions of all versions of one engine, or of every engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=VERSIONS, help="engine to record (default: all)")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="module:qualified.name; needs --engine")
    options = parser.parse_args()
    if options.targets and options.engine is None:
        parser.error("TARGET needs --engine; specify the engine that defines TARGET")
    for engine in [options.engine] if options.engine else VERSIONS:
        record(engine, options.targets)


def record(engine: str, new_targets: list[str]) -> None:
    """Add ``new_targets`` to one adapter's ``known.json``, write it, and print the changes between releases."""
    path = Path(compat.__file__).parent / engine / "known.json"
    known = json.loads(path.read_text())
    targets = sorted({*new_targets, *(target for functions in known.values() for target in functions)})
    releases: dict[str, dict[str, Function]] = {}
    for version in VERSIONS[engine]:
        folder = source_of(engine, version)
        candidates = {target: find(folder, target) for target in targets}
        functions = {target: function for target, function in candidates.items() if function is not None}
        if releases:
            _print_changes(engine, *list(releases.items())[-1], version, functions)
        releases[release_of(version, {}).removesuffix(".0")] = functions
    written = {
        release: {
            target: {"parameters": list(function.parameters), "source": function.source}
            for target, function in functions.items()
        }
        for release, functions in releases.items()
    }
    path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")


def _print_changes(
    engine: str, before: str, old: dict[str, Function], version: str, new: dict[str, Function]
) -> None:
    changes = _differences(old, new) | dict.fromkeys(new.keys() - old.keys(), "is new")
    print(f"{engine} {before} to {version}: {len(changes)} of {len(old)} functions changed")
    for target, change in sorted(changes.items()):
        print(f"  {target} {change}")


if __name__ == "__main__":
    main()
