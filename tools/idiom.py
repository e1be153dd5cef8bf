"""Count odd English and dense code per room, and fail if a rate exceeds its ceiling: ``make idiom``.

Three kinds of occurrences are counted in each room:

- constructions in ``CONSTRUCTIONS`` per 1,000 words of docstrings, comments and Markdown pages;
- assignments of several unrelated values in one statement, per 1,000 lines of code;
- names of variables and parameters that are only a participle or a pronoun, per 100 names.

The expressions also match some correct uses, for example "where" after a place. The ceilings allow for these.

If the arguments name rooms, the program prints the place of each occurrence in these rooms instead.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.sources import LAB, PRODUCT, ROOT, Source, python_files

CONSTRUCTIONS = {
    "'where' instead of 'if'": (
        r"[Ww]here (?:that|it|they|one|none|nobody|an?|the|there|its|all|not|no|some|several|hosts?|ranks?|tokens?"
        r"|experts?|heat|such)\b"
    ),
    "indefinite person or thing": r"(?:[Nn]obody|[Aa]nybody|[Ww]hoever|[Ww]hatever|[Ee]verybody|[Ss]omebody)\b",
    "'but' instead of 'except' or 'unless'": r"(?:but (?:for|that|where)|(?:all|none|nothing|anything) but)\b",
    "preposition before a relative pronoun": (
        r"(?:of|by|under|for|from|in|to|with|after|on|than|between) (?:which|whom|whose)\b"
    ),
    "'is to be'": r"(?:is|are|was|were) to (?:be|have|make|get|follow|hold|go|take|end)\b",
    "'so many', 'as much', 'likewise' or 'alike'": (
        r"(?:so many|so much|so long|as many|as much|likewise|alike|equally many)\b"
    ),
    "'those of' or 'that of'": r"(?:[Tt]hose (?:of|that|by|with|at|alone|before)|[Tt]hat (?:of|with))\b",
    "'what' as a noun clause": (
        r"[Ww]hat (?:is|was|are|has|it|they|an?|the|this|that|its|ranks?|serves|follows|others?|comes|one|balancing"
        r"|each|all)\b"
    ),
    "'none' as a pronoun": (
        r"(?:none (?:is|that|was|are|may|has|does|of|where|waits)|there (?:is|are) none|if (?:there )?(?:is|are) any"
        r"|if any)\b"
    ),
    "'alone' instead of 'only'": r"\w+ alone\b",
    "rare verb or reflexive": (
        r"(?:mend(?:s|ed)?|stumble[sd]?|lacks?|to itself|to themselves|by itself|by themselves|of its own"
        r"|of their own)\b"
    ),
}
"""Constructions typical of a literal translation, each as a regular expression that begins at a word."""

OPENING = "clause instead of a sentence"
"""A docstring or comment that begins with a conjunction, a pronoun or a preposition."""
_OPENING = re.compile(r"\s*(?:Whether|Who|How|Which|That|Those|Of|Beyond)\b")
_CONSTRUCTIONS = {name: re.compile(rf"\b{pattern}") for name, pattern in CONSTRUCTIONS.items()}

_VAGUE_NAME = re.compile(
    r"(?:asked|came|found|given|heard|here|known|left|looked|made|mine|more|most|one|others?|own|said|stated|such|taken"
    r"|theirs|there|told|wanted)_?"
)
"""Participles and pronouns that say nothing about the value when they are a whole name."""

TEST_FOLDERS = ("tests", "benchmarks", "tools")
PAGES = "pages"
"""Room of the Markdown pages at the root of the repository."""

PRODUCT_CEILINGS = (4, 3, 1)
TEST_CEILINGS = (6, 3, 1)
DOCS_CEILINGS = (4, 3, 1)
"""Maximum rates of a room, in the order of ``GAUGES``."""

_COLUMN = 24


class Place(NamedTuple):
    """Path, line and description of one occurrence."""

    path: Path
    line: int
    text: str


@dataclass
class Room:
    """Counts for one room."""

    words: int = 0
    lines: int = 0
    names: int = 0
    odd: list[Place] = field(default_factory=list)
    parallel: list[Place] = field(default_factory=list)
    vague: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Gauge:
    """A rate that must not exceed a ceiling.

    Parameters
    ----------
    name, unit
        Name of the counted occurrences, and the unit of the rate, such as ``1,000 words``.
    occurrences, total
        Attributes of ``Room`` with the occurrences, and with the number of words, lines or names that contain them.
    per
        Number in ``unit``.
    smallest
        Smallest total to divide by. It keeps a single occurrence in a small room from producing a high rate.
    """

    name: str
    unit: str
    occurrences: str
    total: str
    per: int
    smallest: int

    def rate(self, counts: Room) -> float:
        """Return the occurrences per ``per`` words, lines or names."""
        total = max(getattr(counts, self.total), self.smallest)
        return self.per * len(getattr(counts, self.occurrences)) / total


GAUGES = (
    Gauge("odd constructions", "1,000 words", "odd", "words", 1000, 500),
    Gauge("parallel assignments", "1,000 lines", "parallel", "lines", 1000, 500),
    Gauge("vague names", "100 names", "vague", "names", 100, 200),
)


def ceilings(room: str) -> tuple[int, int, int]:
    """Return the ceilings of a room, in the order of ``GAUGES``."""
    folder = room.partition("/")[0]
    if folder in TEST_FOLDERS:
        return TEST_CEILINGS
    return PRODUCT_CEILINGS if folder in (*PRODUCT, LAB) else DOCS_CEILINGS


def main(arguments: list[str]) -> None:
    """Print the rates of all rooms, or the occurrences in some; exit with 1 if a rate exceeds its ceiling."""
    rooms = count_rooms()
    if unknown := [name for name in arguments if name not in rooms]:
        sys.exit(f"make idiom: unknown room {', '.join(unknown)}; choose from {', '.join(rooms)}")
    if arguments:
        for name in arguments:
            print_places(rooms[name])
        return
    print_rates(rooms)
    if above := rates_above(rooms):
        sys.exit("\n".join((*above, 'make idiom: list the places with `make idiom ARGS="ROOM"`')))


def rates_above(rooms: Mapping[str, Room]) -> list[str]:
    """Return a message for each rate that exceeds its ceiling."""
    return [
        f"{name} has {gauge.rate(counts):.1f} {gauge.name} per {gauge.unit}, above its ceiling of {ceiling}"
        for name, counts in rooms.items()
        for gauge, ceiling in zip(GAUGES, ceilings(name), strict=True)
        if gauge.rate(counts) > ceiling
    ]


def count_rooms() -> dict[str, Room]:
    """Count all rooms of the repository."""
    rooms: dict[str, Room] = defaultdict(Room)
    for folder in (*PRODUCT, LAB, *TEST_FOLDERS, "packaging", "examples", "docs"):
        for path in python_files(folder):
            source = Source.read(path)
            room = rooms[source.room if folder in (*PRODUCT, LAB, "tests") else folder]
            for line, text in source.prose():
                add_prose(room, path, line, text)
            add_code(room, source)
    for path in markdown_pages():
        room = rooms[path.parts[0] if len(path.parts) > 1 else PAGES]
        add_prose(room, path, 1, without_code(path.read_text(encoding="utf-8")))
    return dict(sorted(rooms.items()))


def markdown_pages() -> Iterator[Path]:
    """Yield the Markdown pages of the repository, relative to it."""
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "packaging/*/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT)


def without_code(text: str) -> str:
    """Blank the code blocks of a Markdown page, keeping its line numbers."""
    return re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)


def add_prose(room: Room, path: Path, line: int, text: str) -> None:
    """Count the words and the odd constructions of one docstring, comment or page."""
    room.words += len(text.split())
    for position, name in odd_constructions(text):
        room.odd.append(Place(path, line + text.count("\n", 0, position), name))


def odd_constructions(text: str) -> list[tuple[int, str]]:
    """Return the position and the name of each odd construction in a text, in order."""
    positions = [
        (match.start(), name)
        for name, expression in _CONSTRUCTIONS.items()
        for match in expression.finditer(text)
    ]
    if _OPENING.match(text):
        positions.append((0, OPENING))
    return sorted(positions)


def add_code(room: Room, source: Source) -> None:
    """Count the lines, the parallel assignments and the names of one module."""
    room.lines += source.code_lines
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and is_parallel(node):
            room.parallel.append(Place(source.path, node.lineno, f"parallel assignment: {ast.unparse(node)}"))
    for line, name in assigned_names(source.tree):
        room.names += 1
        if _VAGUE_NAME.fullmatch(name):
            room.vague.append(Place(source.path, line, f"vague name: {name}"))


def is_parallel(node: ast.Assign) -> bool:
    """Return True if a statement assigns several values that do not depend on the old ones.

    An exchange such as ``a, b = b, a`` needs a single statement, so it does not count.
    """
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    written = {ast.unparse(element) for element in target.elts}
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    return not written & read


def assigned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each parameter and each assigned variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield parameter.lineno, parameter.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def print_places(room: Room) -> None:
    """Print each occurrence in a room."""
    for place in sorted((*room.odd, *room.parallel, *room.vague)):
        print(f"{place.path}:{place.line}: {place.text}")


def print_rates(rooms: Mapping[str, Room]) -> None:
    """Print the rates of each room beside their ceilings."""
    width = max(map(len, rooms))
    print(" " * width, *(f"{gauge.name:>{_COLUMN}}" for gauge in GAUGES))
    units = (f"per {gauge.unit} (max)" for gauge in GAUGES)
    print(" " * width, *(f"{unit:>{_COLUMN}}" for unit in units))
    for name, counts in rooms.items():
        cells = (
            f"{gauge.rate(counts):.1f} ({ceiling})"
            for gauge, ceiling in zip(GAUGES, ceilings(name), strict=True)
        )
        print(f"{name:<{width}}", *(f"{cell:>{_COLUMN}}" for cell in cells))


if __name__ == "__main__":
    main(sys.argv[1:])
