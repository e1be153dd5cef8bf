"""How the functions that an adapter relies on look in engines' sources, which need not be installed for it.

``make known-engines`` records every version that ``engine_sources`` lists in the adapters' ``known.json``, and prints
what changed from each to the next: read that before a new one is listed. ``ARGS="--engine vllm TARGET ..."`` adds
functions. It finds the same as ``worker_agent.adapters.compat.fingerprint`` does in an installed engine.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Mapping
from pathlib import Path

from tools.engine_sources import VERSIONS, source_of
from worker_agent.adapters import compat
from worker_agent.adapters.compat import Function, fingerprint_of_tree

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def find(folder: Path, target: str) -> Function | None:
    """The function at ``module:qualified.name`` of the package in ``folder``; ``None`` where it is not."""
    module, _, name = target.partition(":")
    path = folder.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return None
    node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        found = [child for child in _definitions(node) if child.name == part]
        if not found:
            return None
        node = found[-1]
    if not isinstance(node, _FUNCTIONS):
        return None
    return Function(_parameters(node), fingerprint_of_tree(ast.Module(body=[node], type_ignores=[])))


def moved(folder: Path, functions: dict[str, Function]) -> dict[str, str]:
    """What of ``functions`` is not the same in the package in ``folder``, by target."""
    return _differences(functions, {target: find(folder, target) for target in functions})


def _differences(known: dict[str, Function], found: Mapping[str, Function | None]) -> dict[str, str]:
    differences = {}
    for target, before in known.items():
        now = found.get(target)
        if now is None:
            differences[target] = "is not there"
        elif now.parameters != before.parameters:
            differences[target] = f"takes ({', '.join(now.parameters)})"
        elif now.source != before.source:
            differences[target] = "has another body"
    return differences


def _definitions(node: ast.AST) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions directly in ``node``, those under ``if`` and ``try`` included."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *_FUNCTIONS)):
            found.append(child)
        elif isinstance(child, (ast.If, ast.Try)):
            found += _definitions(child)
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    spec = function.args
    names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    names += [spec.vararg.arg] if spec.vararg else []
    names += [one.arg for one in spec.kwonlyargs]
    names += [spec.kwarg.arg] if spec.kwarg else []
    return tuple(names)


def main() -> None:
    """Record all known versions of one engine, or of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=VERSIONS, help="this one alone")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="module:qualified.name; needs --engine")
    options = parser.parse_args()
    if options.targets and options.engine is None:
        parser.error("TARGET: name its engine with --engine")
    for engine in [options.engine] if options.engine else VERSIONS:
        record(engine, options.targets)


def record(engine: str, more: list[str]) -> None:
    """Write ``known.json`` of one adapter, with ``more`` functions, and print what changed between releases."""
    path = Path(compat.__file__).parent / engine / "known.json"
    known = json.loads(path.read_text())
    targets = sorted({*more, *(target for functions in known.values() for target in functions)})
    releases: dict[str, dict[str, Function]] = {}
    for version in VERSIONS[engine]:
        folder = source_of(engine, version)
        found = {target: find(folder, target) for target in targets}
        functions = {target: function for target, function in found.items() if function is not None}
        if releases:
            _print_changes(engine, *list(releases.items())[-1], version, functions)
        releases[version.removesuffix(".post1").removesuffix(".0")] = functions
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
