"""A public function with many arguments documents each of them in its docstring."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANY = 5
ELSEWHERE = ("eplb_service/cli/", "eplb_lab/commands/", "eplb_lab/layer/operators/")
"""Folders whose arguments are documented by help texts or by torch_npu."""


def functions():
    """Yield the public functions and methods with at least ``MANY`` arguments."""
    for package in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = str(path.relative_to(ROOT))
            if "/generated/" in module or module.startswith(ELSEWHERE):
                continue
            top = ast.parse(path.read_text()).body
            classes = [node for node in top if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
            for node in [*top, *(member for owner in classes for member in owner.body)]:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                    names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                    names = [name for name in names if name not in ("self", "cls")]
                    if len(names) >= MANY:
                        yield pytest.param(names, ast.get_docstring(node) or "", id=f"{module}:{node.name}")


@pytest.mark.parametrize(("names", "text"), list(functions()))
def test_every_argument_is_explained(names: list[str], text: str) -> None:
    refers = re.search(r"\b(?:[Aa]s for|[Ss]ee|As|[Aa]rguments as|what) ``", text)
    assert refers or [name for name in names if not re.search(rf"\b{name}\b", text)] == []
