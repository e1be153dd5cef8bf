"""Measures the stepwise split, and dealing tables: ``python -m benchmarks.split [--routes PATH]``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.solver.heat_kinds import JITTER, generate
from benchmarks.solver.report.table import Table
from benchmarks.solver.targets import Target
from benchmarks.split import targets
from benchmarks.split.by_source import by_source, drawn_sources
from benchmarks.split.cost import AT_BEST, WITHIN_A_TOKEN, cost
from benchmarks.split.exactness import exactness
from benchmarks.split.floor import EvenFloor
from benchmarks.split.on_device import check_device, device_cost
from benchmarks.split.quality import SPLITS, quality
from benchmarks.split.routed import routed_sources
from benchmarks.split.waterfill import WAYS, Drawn, shared_and_routed
from eplb_service.bench.closed_loop import Course

PARTS = ("recorded", "drawn", "shared", "cost", "exact", "example")
_CHOICES = 8 * 1024
_SHARED_TOKENS = 4096
_KNOWN_STEPS = 4096
"""Of one popularity: half of them say what its means are."""


def main() -> None:
    """Print a table for each part, and at the end every figure beside its target."""
    parser = _parser()
    options = parser.parse_args()
    if options.device != "cpu":
        try:
            check_device(options.device)
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
    console = Console(width=150, highlight=False)
    parts = {
        "recorded": _recorded,
        "drawn": _drawn,
        "shared": _shared,
        "cost": _cost,
        "exact": _exact,
        "example": _example,
    }
    found: list[Target] = []
    for name in options.only or PARTS:
        found += parts[name](options, console)
    if not found:
        return
    rows = [[one.what, one.wanted, one.found, "yes" if one.met else "NO"] for one in found]
    missed = frozenset(number for number, one in enumerate(found) if not one.met)
    console.print(Table("Targets", ["", "wanted", "found", "met"], rows, marked=missed).drawn())


def _recorded(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for path in options.routes:
        source_TRLE = routed_sources(path, options.ranks)
        heat_TLE = source_TRLE.sum(axis=1, dtype=np.int32)
        course = Course(path.parent.name, heat_TLE, options.ranks, options.slots, options.window)
        rows = _quality(course, options, console)
        ratios = _by_source(course, source_TRLE, options, console)
        if (course.name, course.ranks, course.slots) == ("gpt-oss-20b", 8, 5):
            yield from targets.of_recorded(ratios, rows)


def _drawn(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for name, jitter in (("a popularity that stays", 0.0), ("one that jumps by a tenth", JITTER)):
        tokens = _CHOICES // 8
        drawn_TLE = generate("static", options.layers, 256, 4 * options.window, tokens=tokens, jitter=jitter)
        course = Course(f"drawn of {name}", np.ascontiguousarray(drawn_TLE), 32, 9, options.window)
        rows = _quality(course, options, console)
        _by_source(course, drawn_sources(course), options, console)
        more_TLE = generate("static", options.layers, 256, _KNOWN_STEPS, tokens=tokens, jitter=jitter)
        yield from targets.of_drawn(name, rows, EvenFloor.of(more_TLE, course.ranks, course.slots))


def _shared(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    """No target: what is aimed at is routed experts, and here shared ones are evened out with them."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for layer in range(options.layers):
        drawn = Drawn(256, _SHARED_TOKENS, 8, layer)
        for placement, split, ratios in shared_and_routed(drawn, 32, 9, options.window, options.window):
            found.setdefault((placement, split), []).append(ratios)
    rows = [
        [placement, split, *(f"{np.mean([ratios[way] for ratios in layers]):.3f}" for way in WAYS)]
        for (placement, split), layers in found.items()
    ]
    title = (
        f"{_SHARED_TOKENS} tokens x 8 of 256 experts and a shared one, 32 ranks x 9: routed and shared tokens"
    )
    console.print(Table(title, ["placement", "routed experts", *WAYS], rows).drawn())
    yield from ()


def _quality(course: Course, options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    found = list(quality(course, options.window, options.windows))
    rows = [[str(row["placement"]), *(f"{row[split]:.3f}" for split in SPLITS)] for row in found]
    title = f"{course.name}, {course.ranks} ranks x {course.slots}: next window, {options.windows} of them"
    console.print(Table(title, ["placement", *SPLITS], rows).drawn())
    return found


def _by_source(
    course: Course, source_TRLE: np.ndarray, options: argparse.Namespace, console: Console
) -> dict[str, list[float]]:
    windows = min(options.table_windows, len(source_TRLE) // options.window - 1)
    found = by_source(source_TRLE, course.slots, options.window, windows, options.deal_width)
    rows = [
        [name, f"{np.mean(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        for name, ratios in found.items()
    ]
    title = f"{course.name}: next window, {windows} of them; {options.deal_width} entries where tables deal"
    console.print(Table(title, ["tables of each source rank", "mean over layers", "windows"], rows).drawn())
    return found


def _cost(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for tokens in (1024, 4096):
        if options.device != "cpu":
            _cost_on_device(tokens, options.device, console)
            continue
        found = list(cost(256, 32, 9, tokens))
        rows = [
            [
                str(row["rounds"]),
                f"{row['mean']:.2f}",
                f"{row['most']:.2f}",
                f"{row[WITHIN_A_TOKEN]:.2%}",
                f"{row[AT_BEST]:.2%}",
                f"{row['over']:.0f}",
                " / ".join(f"{us:.0f}" for us in row["us"]),  # type: ignore[attr-defined]
            ]
            for row in found
        ]
        title = f"256 experts, 32 ranks x 9, {tokens} tokens; load {os.getloadavg()[0]:.1f}"
        columns = ["rounds", "tokens above the optimum", "most", WITHIN_A_TOKEN, AT_BEST, "most above it"]
        columns.append("us 5 % / 50 % / 95 %")
        console.print(Table(title, columns, rows).drawn())
        if tokens * 8 == _CHOICES:
            yield from targets.of_cost(found)


def _exact(_: argparse.Namespace, console: Console) -> Iterator[Target]:
    found = list(exactness())
    rows = [
        [
            f"{one.ranks} x {one.slots}",
            f"{one.tokens:,}",
            one.popularity,
            str(one.rounds),
            f"{max(one.above.mean(), 0.0):.2f}",
            f"{max(one.above.max(), 0.0):.2f}",
            f"{one.within:.1%}",
            f"{np.mean(one.over == 0):.1%}",
            f"{one.over.max():.0f} ({one.share.max():.2%})",
        ]
        for one in found
    ]
    columns = ["ranks", "tokens", "popularity", "rounds", "tokens above the optimum", "most", WITHIN_A_TOKEN]
    columns += [AT_BEST, "most above it"]
    console.print(Table("256 experts, 8 choices, default rounds", columns, rows).drawn())
    yield from targets.of_exactness(found)


def _cost_on_device(tokens: int, device: str, console: Console) -> None:
    rows = [
        [
            str(row.rounds),
            *(
                " / ".join(f"{us:.0f}" for us in times)
                for times in (row.ends_eager, row.ends_graph, row.choices_eager, row.choices_graph)
            ),
            f"{row.same} of {row.steps}",
        ]
        for row in device_cost(256, 32, 9, tokens, device)
    ]
    columns = ["rounds", "eager", "in a graph", "with choices, eager", "in a graph", "steps alike"]
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    title = f"256 experts, 32 ranks x 9, {tokens} tokens x 8; us at 5 % / 50 % / 95 %; {where}"
    console.print(Table(title, columns, rows).drawn())


def _example(_: argparse.Namespace, __: Console) -> Iterator[Target]:
    yield from targets.of_known_example()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; repeatable")
    parser.add_argument(
        "--routes",
        type=Path,
        action="append",
        default=[],
        help="recorded routes (.npz with routes and req_ptr), decoded 64 requests side by side; repeatable",
    )
    parser.add_argument("--ranks", type=int, default=8, help="of the recorded routes")
    parser.add_argument("--slots", type=int, default=5, help="of each rank")
    parser.add_argument(
        "--window", type=int, default=64, help="steps that a placement is made on, and serves"
    )
    parser.add_argument("--windows", type=int, default=3, help="windows of each heat, spread over it")
    parser.add_argument("--table-windows", type=int, default=24, help="of those of tables, which are quick")
    parser.add_argument("--deal-width", type=int, default=8, help="entries of dealing tables")
    parser.add_argument("--device", default="cpu", help="where the cost is taken: cpu, or cuda for a GPU")
    parser.add_argument("--layers", type=int, default=4, help="of the drawn heat")
    return parser


if __name__ == "__main__":
    main()
