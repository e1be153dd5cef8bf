"""Small defects of a Python source: every place where one can be put, and the source with one of them in it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Add(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
}
# Where a change changes no behaviour that a test should see: what errors say, types, decorators.
_LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One defect.

    Attributes
    ----------
    kind : str
        comparison, arithmetic, boolean, condition, constant or return.
    line : int
        Of the source, from 1 on.
    before, after : str
        The expression as it was and as the mutant has it.
    source : str
        The whole module with the defect.
    """

    kind: str
    line: int
    before: str
    after: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of the source."""
    lines = source.splitlines(keepends=True)
    found = []
    for kind, node, changed in _changes(ast.parse(source)):
        before = ast.get_source_segment(source, node)
        if before is None:
            continue
        after = ast.unparse(changed) if isinstance(changed, ast.stmt) else f"({ast.unparse(changed)})"
        found.append(Mutant(kind, node.lineno, before, after, _replaced(lines, node, after)))
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Every node that can be changed, with what it becomes."""
    for child in _behaviour(tree):
        if isinstance(child, (ast.If, ast.IfExp)):
            yield "condition", child.test, ast.UnaryOp(ast.Not(), child.test)
        elif isinstance(child, (ast.expr, ast.stmt)):
            yield from ((kind, child, changed) for kind, changed in _changes_of(child))
        yield from _changes(child)


def _behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that decide what the program does."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, _LEFT_ALONE) and not _is_typing(child):
                yield child


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes_of(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """What one node can become."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        ops = [_COMPARISONS[type(node.ops[0])], *node.ops[1:]]
        yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)], node.right)
    elif isinstance(node, ast.BoolOp):
        yield "boolean", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "boolean", node.operand
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        changed = copy.copy(node)
        changed.value = ast.Constant(None)
        yield "return", changed


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _replaced(lines: list[str], node: ast.expr | ast.stmt, text: str) -> str:
    """The source with other text where a node is; columns of the tree count bytes."""
    assert node.end_lineno is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], head + text + tail, *lines[last + 1 :]])
