"""A public function of many arguments says what each of them is, in a section or in its text."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANY = 5
ELSEWHERE = ("eplb_service/cli/", "worker_agent/moe/operators/")
"""Where help texts say it, or torch_npu's own documentation."""


def functions():
    """Public functions and methods with so many arguments, by place."""
    for package in ("eplb_service", "worker_agent"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if "/generated/" not in place and not place.startswith(ELSEWHERE):
                yield from _functions(ast.parse(path.read_text()), place)


def _functions(parent, place):
    for node in parent.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node, f"{place}:{node.name}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            names = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            if len(names) >= MANY:
                yield pytest.param(names, ast.get_docstring(node) or "", id=f"{place}:{node.name}")


@pytest.mark.parametrize(("names", "text"), list(functions()))
def test_every_argument_is_explained(names: list[str], text: str) -> None:
    refers = re.search(r"\b(?:[Aa]s for|[Ss]ee|As|[Aa]rguments as|what) ``", text)
    assert refers or [name for name in names if not re.search(rf"\b{name}\b", text)] == []
