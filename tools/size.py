"""Print the size of the code in each room, and fail if a figure exceeds its ceiling: ``make size``.

The size is the number of code tokens, so neither documentation nor formatting changes it. The tours in
``tools/size_tours.py`` count the files and types that a reader meets when following one datum through the code.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tools.size_tours import TOURS, TourError, measure
from tools.sources import LAB, PRODUCT, ROOT, Source, python_files


class Limit(NamedTuple):
    """Target for a figure, and the ceiling that no change may exceed."""

    target: int
    ceiling: int


LONG_FUNCTION_LINES = 50
MANY_PARAMETERS = 8
LARGE_MODULE_TOKENS = 3000

TOKENS = "code tokens"
LONG_FUNCTIONS = f"functions over {LONG_FUNCTION_LINES} lines"
WIDE_FUNCTIONS = f"functions over {MANY_PARAMETERS} positional parameters"
LARGE_MODULES = f"modules over {LARGE_MODULE_TOKENS:,} tokens"
ROOM_FIGURES = (TOKENS, LONG_FUNCTIONS, WIDE_FUNCTIONS, LARGE_MODULES)

LIMITS = {
    "code tokens of core, service and agent": Limit(215_000, 301_000),
    "code tokens with the lab": Limit(240_000, 359_000),
    LONG_FUNCTIONS: Limit(4, 6),
    WIDE_FUNCTIONS: Limit(7, 12),
    LARGE_MODULES: Limit(7, 7),
    "planner settings": Limit(18, 19),
    "service settings": Limit(28, 30),
    "agent settings": Limit(30, 31),
    "lines of eplb replay --help": Limit(130, 143),
    "lines of eplb serve --help": Limit(190, 209),
    "files of a setting": Limit(13, 14),
    "types of a setting": Limit(5, 5),
    "files of a heat report": Limit(18, 18),
    "types of a heat report": Limit(10, 10),
    "files of a plan": Limit(25, 25),
    "types of a plan": Limit(15, 15),
}
"""Limits for the product and the lab. Tests, benchmarks, tools and docs have no limits."""

SETTINGS = {
    "planner settings": ("eplb_core/planner/settings.py", "PlannerSettings"),
    "service settings": ("eplb_service/control/server/settings.py", "ServiceSettings"),
    "agent settings": ("worker_agent/settings.py", "AgentSettings"),
}


def main() -> None:
    """Print the figures per room and in total. Exit with 1 if a figure exceeds its ceiling."""
    sources = [Source.read(path) for package in (*PRODUCT, LAB) for path in python_files(package)]
    rooms = room_figures(sources)
    try:
        totals = total_figures(rooms, sources)
    except TourError as error:
        sys.exit(f"make size: {error}; correct the tour in tools/size_tours.py")
    print_figures(rooms, totals)
    if over := [name for name, limit in LIMITS.items() if totals[name] > limit.ceiling]:
        sys.exit(f"make size: these figures exceed their ceilings: {', '.join(over)}")


def room_figures(sources: Iterable[Source]) -> dict[str, Counter[str]]:
    """Count ``ROOM_FIGURES`` per room."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for source in sources:
        figures = rooms[source.room]
        tokens = source.code_tokens
        figures[TOKENS] += tokens
        figures[LARGE_MODULES] += tokens > LARGE_MODULE_TOKENS
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                figures[LONG_FUNCTIONS] += line_count(node) > LONG_FUNCTION_LINES
                figures[WIDE_FUNCTIONS] += positional_parameters(node) > MANY_PARAMETERS
    return dict(sorted(rooms.items()))


def line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines in a function, without its docstring and decorators."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def positional_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters that can be passed by position, without ``self`` and ``cls``."""
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def total_figures(rooms: Mapping[str, Counter[str]], sources: Iterable[Source]) -> dict[str, int]:
    """Return every figure in ``LIMITS``, and the number of code tokens in the lab."""
    sums = Counter[str]()
    tokens = Counter[str]()
    for room, figures in rooms.items():
        sums.update(figures)
        tokens[room.partition("/")[0]] += figures[TOKENS]
    by_path = {source.path.as_posix(): source for source in sources}
    totals = {
        "code tokens of core, service and agent": sum(tokens[package] for package in PRODUCT),
        "code tokens of the lab": tokens[LAB],
        "code tokens with the lab": sums[TOKENS],
    }
    totals |= {name: sums[name] for name in (LONG_FUNCTIONS, WIDE_FUNCTIONS, LARGE_MODULES)}
    totals |= {
        name: setting_count(by_path[path], class_name) for name, (path, class_name) in SETTINGS.items()
    }
    totals |= {f"lines of eplb {command} --help": help_lines(command) for command in ("replay", "serve")}
    for tour in TOURS:
        size = measure(tour, by_path)
        totals[f"files of {tour.datum}"] = size.files
        totals[f"types of {tour.datum}"] = size.types
    return totals


def setting_count(source: Source, class_name: str) -> int:
    """Return the number of fields in a settings class."""
    (settings,) = (
        node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    fields = [node.target for node in settings.body if isinstance(node, ast.AnnAssign)]
    return sum(isinstance(field, ast.Name) and field.id != "model_config" for field in fields)


def help_lines(command: str) -> int:
    """Return the number of lines in a command's help at 80 columns."""
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = subprocess.run(
        [sys.executable, "-m", "eplb_service.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    return shown.stdout.count("\n")


def print_figures(rooms: Mapping[str, Counter[str]], totals: Mapping[str, int]) -> None:
    """Print a table of the rooms, then each total with its target and ceiling."""
    width = max(map(len, rooms))
    print(" " * width, *ROOM_FIGURES, sep="  ")
    for room, figures in rooms.items():
        print(f"{room:<{width}}", *(f"{figures[name]:>{len(name)},}" for name in ROOM_FIGURES), sep="  ")
    print()
    print(f"{'':<40}{'now':>9}{'target':>9}{'ceiling':>9}")
    for name, value in totals.items():
        if name not in LIMITS:
            print(f"{name:<40}{value:>9,}")
            continue
        limit = LIMITS[name]
        note = ""
        if value > limit.ceiling:
            note = "  ABOVE THE CEILING"
        elif value > limit.target:
            note = "  above the target"
        print(f"{name:<40}{value:>9,}{limit.target:>9,}{limit.ceiling:>9,}{note}")


if __name__ == "__main__":
    main()
