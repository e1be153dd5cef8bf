"""The repository's Python sources, as the gauges read them: text, syntax tree, code tokens and prose."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("eplb_core", "eplb_service", "worker_agent")
LAB = "eplb_lab"

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)


@dataclass(frozen=True)
class Source:
    """One Python module: its path relative to the repository, and its text."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read the module at a path relative to the repository."""
        return cls(path, (ROOT / path).read_text(encoding="utf-8"))

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the module."""
        return ast.parse(self.text)

    @functools.cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """Tokens of the module, including comments and layout."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def room(self) -> str:
        """Package to which the module's figures are added: two directories deep, or three below ``control``."""
        parents = self.path.parent.parts
        return "/".join(parents[: 3 if parents[1:2] == ("control",) else 2])

    @property
    def code_tokens(self) -> int:
        """Number of tokens without docstrings, comments and layout.

        An f-string counts as one token, as in Python 3.11. Later versions split f-strings, but their parts are not
        counted.
        """
        prose = {line for node in self._docstrings() for line in range(node.lineno, _last_line(node) + 1)}
        count = 0
        depth = 0
        for token in self.tokens:
            if token.type in _LAYOUT or (token.type == tokenize.STRING and token.start[0] in prose):
                continue
            if token.type == _FSTRING_END:
                depth -= 1
                continue
            count += depth == 0
            depth += token.type == _FSTRING_START
        return count

    @property
    def code_lines(self) -> int:
        """Number of lines that are neither blank nor a comment."""
        return sum(bool(line.strip()) and not line.strip().startswith("#") for line in self.text.splitlines())

    def prose(self) -> Iterator[tuple[int, str]]:
        """Yield each docstring and each block of comment lines, with the number of its first line."""
        for node in self._docstrings():
            assert isinstance(node.value, ast.Constant)
            yield node.lineno, node.value.value
        block: list[tokenize.TokenInfo] = []
        for token in self.tokens:
            if token.type != tokenize.COMMENT:
                continue
            if block and token.start[0] != block[-1].start[0] + 1:
                yield block[0].start[0], _comment_text(block)
                block = []
            block.append(token)
        if block:
            yield block[0].start[0], _comment_text(block)

    def _docstrings(self) -> list[ast.Expr]:
        """Return all statements that consist only of a string, including attribute docstrings."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]


def python_files(folder: str) -> list[Path]:
    """Return the Python files below a directory, relative to the repository, except generated ones."""
    paths = (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in paths if "generated" not in path.parts]


def _last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _comment_text(block: list[tokenize.TokenInfo]) -> str:
    return "\n".join(token.string.lstrip("#").strip() for token in block)
