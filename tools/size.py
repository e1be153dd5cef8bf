"""Prints how large the house is, room by room, and fails where a ceiling is passed: ``make size``.

A module with content has more than five lines and is no ``__init__``. A public name is a function or a class at the top
of a module whose name has no leading underscore. A value type is a dataclass, a ``NamedTuple``, a ``TypedDict`` or a
pydantic model. A small module is one under 110 lines that one other module alone imports.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.size_tours import TOURS, Tour

ROOT = Path(__file__).parent.parent
PRODUCT = ("eplb_core", "eplb_lab", "eplb_service", "worker_agent")
TARGETS = {
    "modules": 245,
    "small modules": 26,
    "public names": 900,
    "value types": 195,
    "planner settings": 18,
    "service settings": 28,
    "agent settings": 22,
    "lines of eplb replay --help": 130,
    "lines of eplb serve --help": 190,
    "docstrings that open with a riddle": 0,
    "files of a setting": 8,
    "names of a setting": 1,
    "files of heat": 12,
    "types of heat": 4,
    "files of a plan": 18,
    "types of a plan": 8,
}
"""Target sizes. Tests, benchmarks, tools and docs have none: a new test should never need room made for it."""
CEILINGS = {name: target * 11 // 10 for name, target in TARGETS.items()}
"""The most that each figure may be: what features bring, they find room for within a tenth."""
ROOM_FIGURES = ("lines", "modules", "small modules", "public names", "value types", "riddles")
SETTINGS = {
    "planner settings": ("eplb_core/planner/settings.py", "PlannerSettings"),
    "service settings": ("eplb_service/control/server/settings.py", "ServiceSettings"),
    "agent settings": ("worker_agent/settings.py", "AgentSettings"),
}
_RIDDLE = re.compile(r"(What|Whether|Who|How|Which|That|Those|Of)\b")
_VALUE_BASES = {"NamedTuple", "TypedDict", "BaseModel", "BaseSettings"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Source(NamedTuple):
    """One module: its path below the root, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Dotted name of the module."""
        return ".".join(self.path.with_suffix("").parts)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n")

    @property
    def room(self) -> str:
        """Package that the module is counted under."""
        parents = self.path.parent.parts
        return "/".join(parents[: 3 if parents[1:2] == ("control",) else 2])


def main() -> None:
    """Print the figures per room and in total; exit with 1 where a ceiling is passed."""
    sources = [read(path) for package in PRODUCT for path in python_files(package)]
    rooms = room_figures(sources)
    totals = total_figures(rooms, sources)
    show(rooms, totals)
    if over := [name for name, most in CEILINGS.items() if totals[name] > most]:
        sys.exit(f"make size: above the ceiling: {', '.join(over)}")


def python_files(folder: str) -> list[Path]:
    """Python files below a folder, relative to the root, without generated ones."""
    found = (path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if "generated" not in path.parts]


def read(path: Path) -> Source:
    """Read and parse one module."""
    text = (ROOT / path).read_text()
    return Source(path, text, ast.parse(text))


def room_figures(sources: list[Source]) -> dict[str, dict[str, int]]:
    """Count ``ROOM_FIGURES`` for each room."""
    importers = count_importers(sources)
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for source in sources:
        figures = rooms[source.room]
        figures["lines"] += source.lines
        if has_content(source):
            figures["modules"] += 1
            figures["small modules"] += source.lines < 110 and importers[source.name] == 1
        figures["public names"] += sum(
            isinstance(node, _DEFINITIONS) and not node.name.startswith("_") for node in source.tree.body
        )
        for node in ast.walk(source.tree):
            figures["value types"] += isinstance(node, ast.ClassDef) and is_value_type(node)
            if isinstance(node, (ast.Module, *_DEFINITIONS)):
                figures["riddles"] += bool(_RIDDLE.match(ast.get_docstring(node) or ""))
    return {room: {name: rooms[room][name] for name in ROOM_FIGURES} for room in sorted(rooms)}


def has_content(source: Source) -> bool:
    """Return whether a module counts as one."""
    return source.lines > 5 and source.path.name != "__init__.py"


def count_importers(sources: Iterable[Source]) -> Counter[str]:
    """Count, for each module, the modules that import it or a name of it."""
    importers: dict[str, set[Path]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers[name].add(source.path)
    return Counter({name: len(paths) for name, paths in importers.items()})


def is_value_type(node: ast.ClassDef) -> bool:
    """Return whether a class only carries fields."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return any("dataclass" in decorator for decorator in decorators) or bool(bases & _VALUE_BASES)


def total_figures(rooms: Mapping[str, Mapping[str, int]], sources: list[Source]) -> dict[str, int]:
    """Sum the rooms and add what is counted once for the whole project; the keys are those of ``CEILINGS``."""
    total = {name: sum(room[name] for room in rooms.values()) for name in ROOM_FIGURES}
    totals = {
        "product lines": total["lines"],
        "modules": total["modules"],
        "small modules": total["small modules"],
        "public names": total["public names"],
        "value types": total["value types"],
    }
    totals |= {name: setting_count(*where, sources) for name, where in SETTINGS.items()}
    totals |= {f"lines of eplb {name} --help": help_lines(name) for name in ("replay", "serve")}
    totals["docstrings that open with a riddle"] = total["riddles"]
    for tour in TOURS:
        totals |= tour_figures(tour, {source.path.as_posix(): source for source in sources})
    return totals


def setting_count(path: str, name: str, sources: list[Source]) -> int:
    """Count the fields of a settings class."""
    (tree,) = [source.tree for source in sources if source.path.as_posix() == path]
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node.target for node in settings.body if isinstance(node, ast.AnnAssign)]
    return sum(isinstance(target, ast.Name) and target.id != "model_config" for target in fields)


def help_lines(command: str) -> int:
    """Count the lines of a command's help at 80 columns."""
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "eplb_service.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    return done.stdout.count("\n")


def tour_figures(tour: Tour, sources: Mapping[str, Source]) -> dict[str, int]:
    """Walk one tour: each stop must define its name, and neighbouring stops must know of each other.

    Returns the number of files that the tour leads through, and of the types, or names, that its datum has there.
    """
    for path, name in tour.stops:
        if not re.search(
            rf"\b(def|class) {name}\b|^\s*{name}\b.*[:=]", sources[path].text, flags=re.MULTILINE
        ):
            sys.exit(f"make size: {path} does not define {name}, a stop of the tour of {tour.datum}")
    for before, stop in pairwise(tour.stops):
        if not (names(sources, before, stop) or names(sources, stop, before)):
            sys.exit(f"make size: in the tour of {tour.datum} nothing leads from {before} to {stop}")
    everything = "".join(source.text for source in sources.values())
    if missing := [name for name in tour.carriers if not re.search(rf"\b{name}\b", everything)]:
        sys.exit(f"make size: {', '.join(missing)}, which should carry {tour.datum}, cannot be found")
    return {
        f"files of {tour.datum}": len({path for path, _ in tour.stops}),
        f"{tour.carrier_word} of {tour.datum}": len(tour.carriers),
    }


def names(sources: Mapping[str, Source], here: tuple[str, str], there: tuple[str, str]) -> bool:
    """Return whether the file of one stop imports the file of another, or names its definition."""
    text = sources[here[0]].text
    return there[0].removesuffix(".py").replace("/", ".") in text or bool(re.search(rf"\b{there[1]}\b", text))


def show(rooms: Mapping[str, Mapping[str, int]], totals: Mapping[str, int]) -> None:
    """Print the rooms as a table, then each total beside its ceiling."""
    width = max(map(len, rooms))
    print(" " * width, *(f"{name:>13}" for name in ROOM_FIGURES))
    for room, figures in rooms.items():
        print(f"{room:<{width}}", *(f"{figures[name]:>13,}" for name in ROOM_FIGURES))
    print()
    print(" " * 36, f"{'now':>7}{'target':>9}{'ceiling':>9}")
    for name, most in CEILINGS.items():
        above = (
            "  ABOVE" if totals[name] > most else "  above the target" if totals[name] > TARGETS[name] else ""
        )
        print(f"{name:<36} {totals[name]:>7,}{TARGETS[name]:>9,}{most:>9,}{above}")


if __name__ == "__main__":
    main()
