"""How the functions that an adapter relies on look in an engine's source, which needs not be installed for it.

``python -m tools.engine_fingerprints vllm 0.32 FOLDER [TARGET ...]`` records a release in the adapter's ``known.json``,
once ``tests/engines`` pass on it: the functions that the file has of other releases, and further targets. FOLDER holds
the engine's package. It finds the same as ``worker_agent.adapters.compat.fingerprint`` does in the installed engine.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

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
    differences = {}
    for target, known in functions.items():
        found = find(folder, target)
        if found is None:
            differences[target] = "is not there"
        elif found.parameters != known.parameters:
            differences[target] = f"takes ({', '.join(found.parameters)})"
        elif found.source != known.source:
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


def main(engine: str, release: str, folder: str, *targets: str) -> None:
    """Write the release's entry; a function that it does not have is left out and named."""
    path = Path(compat.__file__).parent / engine / "known.json"
    known = json.loads(path.read_text())
    targets = tuple(sorted({*targets, *(target for functions in known.values() for target in functions)}))
    known[release] = {}
    for target in targets:
        found = find(Path(folder), target)
        if found is None:
            print(f"{release} does not have {target}", file=sys.stderr)
            continue
        known[release][target] = {"parameters": list(found.parameters), "source": found.source}
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
