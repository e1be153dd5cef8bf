"""A public function of many arguments says what each of them is, in a section or in its text."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MANY = 5
ELSEWHERE = ("eplb_service/cli/", "eplb_lab/commands/", "eplb_lab/layer/operators/")
"""Where help texts say it, or torch_npu's own documentation."""


def functions():
    """Public functions and methods with so many arguments, by place."""
    for package in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if "/generated/" in place or place.startswith(ELSEWHERE):
                continue
            top = ast.parse(path.read_text()).body
            classes = [node for node in top if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
            for node in [*top, *(member for one in classes for member in one.body)]:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                    names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
                    names = [name for name in names if name not in ("self", "cls")]
                    if len(names) >= MANY:
                        yield pytest.param(names, ast.get_docstring(node) or "", id=f"{place}:{node.name}")


@pytest.mark.parametrize(("names", "text"), list(functions()))
def test_every_argument_is_explained(names: list[str], text: str) -> None:
    refers = re.search(r"\b(?:[Aa]s for|[Ss]ee|As|[Aa]rguments as|what) ``", text)
    assert refers or [name for name in names if not re.search(rf"\b{name}\b", text)] == []
