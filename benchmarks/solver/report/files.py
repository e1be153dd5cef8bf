"""Writes what a run found: all rows as JSON, tables as Markdown, plots as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.solver.report.tables import tables
from eplb_service.atomic_write import OutputError, write_atomically


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Everything that was measured."""
    write_atomically(path, json.dumps(results, indent=1).encode())


def write_folder(folder: Path, results: Mapping[str, Any]) -> None:
    """``solver.md`` and a plot for each measurement; raises ``OutputError``, also where matplotlib is missing."""
    try:
        from benchmarks.solver.report.plots import plots
    except ImportError as error:
        raise OutputError("plots need matplotlib: pip install 'eplb-service[bench]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made ({error.strerror})") from error
    drawn = plots(results)
    for name, picture in drawn.items():
        write_atomically(folder / name, picture)
    about = results["about"]
    lines = ["# The solver beside its peers", "", f"`{about['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in about.items() if name != "command"]
    lines += [f"- not measured: {failure['policy']}: {failure['why']}" for failure in results["failures"]]
    parts = ["\n".join(lines) + "\n", *(f"![{name[:-4]}]({name})\n" for name in drawn)]
    parts += [table.markdown() for table in tables(results)]
    write_atomically(folder / "solver.md", "\n".join(parts).encode())
