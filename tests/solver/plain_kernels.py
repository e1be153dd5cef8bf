"""Run the solver in plain Python, to detect negative indices and reads of uninitialised memory.

In a compiled kernel, a negative index wraps around to the end of the array, even with bounds checking. A mistaken
negative index therefore goes unnoticed. This module rewrites every subscript of the solver so that it rejects negative
numbers, except literal ones. It also fills uninitialised arrays with numbers that are invalid as indices.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

_GUARD = "_checked_index"
_POISON = -(10**9)


def install() -> None:
    """Rewrite every solver module when it is imported. Must run before the first such import."""
    assert not any(name.startswith("eplb_core.solver.") for name in sys.modules)
    sys.meta_path.insert(0, _Rewriter())
    from eplb_core.solver import jit

    jit.kernel = jit.part = lambda function: function
    # Compiled arithmetic does not warn about overflow or division by zero.
    warnings.simplefilter("ignore", RuntimeWarning)
    numpy_empty = np.empty
    np.empty = lambda shape, dtype=float, **options: _poisoned(numpy_empty(shape, dtype, **options))
    np.empty_like = lambda array, **options: _poisoned(numpy_empty(array.shape, array.dtype))


class _Rewriter(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("eplb_core.solver."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        spec.loader = _Loader(name, str(spec.origin))
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(guarded(self.get_source(fullname) or ""), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _GUARD, checked_index)
        super().exec_module(module)


def guarded(source: str) -> ast.Module:
    """Return the syntax tree of the source with every subscript guarded."""
    return ast.fix_missing_locations(_Guard().visit(ast.parse(source)))


def checked_index(index: Any) -> Any:
    """Return the index unchanged. Raises ``IndexError`` if it is or contains a negative number."""
    if isinstance(index, (int, np.integer)) and index < 0:
        raise IndexError(f"index {index} wraps around")
    if isinstance(index, np.ndarray) and index.dtype.kind == "i" and (index < 0).any():
        raise IndexError(f"an index in {index} wraps around")
    return index


class _Guard(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        self.generic_visit(node)
        node.slice = self._guarded(node.slice)
        return node

    def _guarded(self, index: ast.expr) -> ast.expr:
        if isinstance(index, ast.Tuple):
            return ast.Tuple([self._guarded(element) for element in index.elts], index.ctx)
        if isinstance(index, ast.Slice):
            bounds = [bound and self._guarded(bound) for bound in (index.lower, index.upper)]
            return ast.Slice(*bounds, index.step)
        literal = index.operand if isinstance(index, ast.UnaryOp) else index
        if isinstance(literal, ast.Constant):
            return index
        return ast.Call(ast.Name(_GUARD, ast.Load()), [index], [])


def _poisoned(array: np.ndarray) -> np.ndarray:
    array.fill(np.nan if array.dtype.kind == "f" else _POISON if array.dtype.kind == "i" else 1)
    return array


if __name__ == "__main__":
    install()
    from tests.solver import awkward_plans

    print(awkward_plans.run(steps=(4,)))
