"""Measure the stepwise split and dealing tables: ``python -m benchmarks.split [--routes PATH]``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.solver.heats import JITTER, generate
from benchmarks.solver.judged import Target
from benchmarks.solver.measures import HEAT, MEAN, RANKS, SLOTS
from benchmarks.solver.tables import Table, target_table
from benchmarks.split.measures import (
    DEALT,
    EVEN_SHARES,
    FOR_EVEN,
    FOR_STEPS,
    SOLVED,
    SPLITS,
    STEPWISE,
    Exactness,
    by_source,
    cost,
    decision_cpu,
    drawn_sources,
    exactness,
    quality,
    routed_sources,
    within_a_token,
)
from eplb_lab.bench.closed_loop import Scenario
from eplb_service.offline import solve
from worker_agent.stepwise import ROUNDS

_CHOICES = 8 * 1024


def main() -> None:
    """Print a table per measurement and, at the end, each figure with its target."""
    options = _parser().parse_args()
    console = Console(width=150, highlight=False)
    targets: list[Target] = []
    for name in options.only or PARTS:
        targets += PARTS[name](options, console)
    if targets:
        console.print(target_table(targets).drawn())


def _recorded(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for path in options.routes:
        source_TRLE = routed_sources(path, options.ranks, order_seed=options.order_seed)
        heat_TLE = source_TRLE.sum(axis=1, dtype=np.int32)
        scenario = Scenario(path.parent.name, heat_TLE, options.ranks, options.slots, options.window)
        rows = _quality(scenario, options, console)
        ratios = _by_source(scenario, source_TRLE, options, console)
        yield from _decisions_on(scenario, options, console)
        if (scenario.name, scenario.ranks, scenario.slots) == ("gpt-oss-20b", 8, 5):
            yield from of_recorded(ratios, rows, RECORDED if options.order_seed is None else SHUFFLED)


def _drawn(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for name, jitter in (("constant popularity", 0.0), ("popularity with a jitter of 0.1", JITTER)):
        tokens = _CHOICES // 8
        drawn_TLE = generate("static", options.layers, 256, 4 * options.window, tokens=tokens, jitter=jitter)
        scenario = Scenario(f"drawn, {name}", np.ascontiguousarray(drawn_TLE), 32, 9, options.window)
        rows = _quality(scenario, options, console)
        _by_source(scenario, drawn_sources(scenario), options, console)
        yield from of_drawn(name, rows)


def _quality(scenario: Scenario, options: argparse.Namespace, console: Console) -> list[dict[str, object]]:
    measured = list(quality(scenario, options.window, options.windows))
    rows = [[str(row["placement"]), *(f"{row[split]:.3f}" for split in SPLITS)] for row in measured]
    title = (
        f"{scenario.name}, {scenario.ranks} ranks x {scenario.slots}: PAR on the next window, "
        f"{options.windows} windows"
    )
    console.print(Table(title, ["placement", *SPLITS], rows).drawn())
    return measured


def _by_source(
    scenario: Scenario, source_TRLE: np.ndarray, options: argparse.Namespace, console: Console
) -> dict[str, list[float]]:
    windows = min(options.table_windows, len(source_TRLE) // options.window - 1)
    ratios_by_table = by_source(source_TRLE, scenario.slots, options.window, windows, options.deal_width)
    rows = [
        [name, f"{np.mean(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        for name, ratios in ratios_by_table.items()
    ]
    title = f"{scenario.name}: PAR on the next window, {windows} windows; dealing tables: {options.deal_width} entries"
    console.print(Table(title, ["tables of each source rank", "mean over layers", "windows"], rows).drawn())
    return ratios_by_table


def _decisions(options: argparse.Namespace, console: Console) -> Iterator[Target]:
    for kind in ("static", "drift"):
        heat_TLE = generate(kind, options.layers, 256, 4 * options.window, tokens=_CHOICES // 8)
        scenario = Scenario(kind, np.ascontiguousarray(heat_TLE), 32, 9, options.window)
        yield from _decisions_on(scenario, options, console)


def _decisions_on(scenario: Scenario, options: argparse.Namespace, console: Console) -> Iterator[Target]:
    milliseconds = decision_cpu(scenario, options.window, options.windows)
    rows = [[split, *(f"{ms:.2f}" for ms in found)] for split, found in milliseconds.items()]
    windows = [f"window {k + 1}" for k in range(options.windows)]
    title = f"{scenario.name}, {scenario.ranks} ranks x {scenario.slots}: CPU ms of a decision per layer"
    console.print(Table(title, ["split", *windows], rows).drawn())
    yield of_decisions(f"{scenario.name}, {scenario.ranks} ranks x {scenario.slots}", milliseconds)


def _cost(_: argparse.Namespace, console: Console) -> Iterator[Target]:
    for tokens in (1024, 4096):
        measured = list(cost(32, 9, tokens))
        rows = [
            [
                str(row["rounds"]),
                *_above(row["above"]),
                " / ".join(f"{us:.0f}" for us in np.percentile(row["us"], (5, 50, 95))),
            ]
            for row in measured
        ]
        title = f"256 experts, 32 ranks x 9, {tokens} tokens; load {os.getloadavg()[0]:.1f}"
        console.print(Table(title, ["rounds", *_ABOVE, "us: 5 % / 50 % / 95 %"], rows).drawn())
        if tokens * 8 == _CHOICES:
            yield from of_cost(measured)


def _exact(_: argparse.Namespace, console: Console) -> Iterator[Target]:
    measured = list(exactness())
    rows = [
        [f"{row.ranks} x {row.slots}", f"{row.tokens:,}", row.popularity, *_above(row.above)]
        for row in measured
    ]
    columns = ["ranks", "tokens", "popularity", *_ABOVE]
    console.print(Table("256 experts, 8 choices, default rounds", columns, rows).drawn())
    yield from of_exactness(measured)


_ABOVE = ("tokens above the optimum", "maximum", "within one token")


def _above(above: Sequence[float]) -> list[str]:
    return [f"{max(np.mean(above), 0.0):.2f}", f"{max(*above, 0.0):.2f}", f"{within_a_token(above):.1%}"]


def _example(_: argparse.Namespace, __: Console) -> Iterator[Target]:
    yield from of_known_example()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="part to measure; repeatable")
    parser.add_argument(
        "--routes",
        type=Path,
        action="append",
        default=[],
        help="recorded routes (.npz with routes and req_ptr), decoded 64 requests at a time; repeatable",
    )
    parser.add_argument("--order-seed", type=int, help="seed for a random order of the recorded requests")
    parser.add_argument("--ranks", type=int, default=8, help="ranks for the recorded routes")
    parser.add_argument("--slots", type=int, default=5, help="slots per rank")
    parser.add_argument("--window", type=int, default=64, help="steps per window")
    parser.add_argument("--windows", type=int, default=3, help="number of windows, spread over the heat")
    parser.add_argument(
        "--table-windows", type=int, default=24, help="number of windows for comparing tables"
    )
    parser.add_argument("--deal-width", type=int, default=8, help="entries per expert in dealing tables")
    parser.add_argument("--layers", type=int, default=4, help="layers of the drawn heat")
    return parser


Rows = Sequence[Mapping[str, Any]]

_KNOWN_ENTRIES = 16
_MAX_KNOWN_TOKENS = 194.0
"""Maximum number of tokens on the hottest rank. 182 is possible, but only a random search over placements finds it."""
_MAX_MICROSECONDS = 200.0
_MAX_DECISION_RATIO = 3.0
RECORDED = {SOLVED: 1.225, DEALT: 1.20, STEPWISE: 1.03}
"""Target PAR on the next window for gpt-oss-20b decoding 64 requests on 8 ranks x 5 slots."""
SHUFFLED = RECORDED | {DEALT: 1.19}
"""The same targets, with requests in random order."""
DRAWN = {EVEN_SHARES: 1.11, STEPWISE: 1.04}
"""Target PAR on the next window for 256 experts on 32 ranks x 9 slots, with 1,024 tokens x 8 choices per step."""


def of_recorded(
    by_source: Mapping[str, Sequence[float]], quality: Rows, limits: Mapping[str, float]
) -> Iterator[Target]:
    """Yield the targets for recorded heat: one replica per source rank, dealing tables, and the stepwise split."""
    ratios = {name: float(np.mean(by_source[name])) for name in (SOLVED, DEALT)}
    ratios[STEPWISE] = _ratio(quality, FOR_STEPS, STEPWISE)
    labels = {SOLVED: "one replica per source rank", DEALT: "dealt", STEPWISE: "stepwise"}
    for name, limit in limits.items():
        yield _at_most(f"gpt-oss-20b, 8 ranks x 5 slots, next window: {labels[name]}", limit, ratios[name])


def of_drawn(heat: str, quality: Rows) -> Iterator[Target]:
    """Yield the targets for drawn heat."""
    for split, placement in ((EVEN_SHARES, FOR_EVEN), (STEPWISE, FOR_STEPS)):
        name = f"256 experts, 32 ranks x 9 slots, {heat}, next window: {split}"
        yield _at_most(name, DRAWN[split], _ratio(quality, placement, split))


def of_cost(cost: Rows) -> Iterator[Target]:
    """Yield the targets for the stepwise split with its default number of rounds."""
    row = next(row for row in cost if row["rounds"] == ROUNDS)
    quiet, median, slow = np.percentile(row["us"], (5, 50, 95))
    name = f"stepwise split of a layer, one core, {ROUNDS} rounds"
    yield Target(
        f"{name}: CPU microseconds of the median call",
        f"at most {_MAX_MICROSECONDS:g}",
        f"{median:.0f} (5 %: {quiet:.0f}, 95 %: {slow:.0f})",
        bool(median <= _MAX_MICROSECONDS),
    )
    yield _exact_to_a_token(name, row["above"])


def of_decisions(heat: str, milliseconds: Mapping[str, Sequence[float]]) -> Target:
    """Return the target for the CPU time of a decision for the stepwise split, relative to one for tables."""
    ratios = np.divide(milliseconds["step"], milliseconds["tables"])
    total = sum(milliseconds["step"]) / sum(milliseconds["tables"])
    return Target(
        f"{heat}: CPU time of a decision for the stepwise split, relative to one for tables",
        f"at most {_MAX_DECISION_RATIO:g}",
        f"{total:.2f} ({ratios.min():.2f} to {ratios.max():.2f})",
        bool(total <= _MAX_DECISION_RATIO),
    )


def of_exactness(found: Sequence[Exactness]) -> Iterator[Target]:
    """Yield one target per rank count and popularity, over steps of all sizes."""
    above: dict[str, list[float]] = {}
    for row in found:
        name = f"{row.ranks} ranks x {row.slots}, steps of all sizes, {row.popularity}"
        above.setdefault(name, []).extend(row.above)
    for name, steps in above.items():
        yield _exact_to_a_token(f"stepwise split, {name}", steps)


def _exact_to_a_token(name: str, above: Sequence[float]) -> Target:
    within = within_a_token(above)
    figure = f"{np.mean(above):.2f}, at most {max(above):.1f}; {within:.1%} of steps within one token"
    return Target(f"{name}: tokens above the optimum", "within one token", figure, within == 1.0)


def of_known_example() -> Iterator[Target]:
    """Yield the target for an example with a known optimum: 8 experts on 8 ranks x 2 slots, with 8 source ranks."""
    heat_TLE = HEAT[None, None]
    solved = solve(heat_TLE, RANKS, SLOTS, split="deal", deal_width=_KNOWN_ENTRIES, threads=1)
    hottest = float(solved.hottest_after_L[0])
    yield Target(
        f"known example, {_KNOWN_ENTRIES} entries: hottest rank (mean {MEAN:g})",
        f"at most {_MAX_KNOWN_TOKENS:g}",
        f"{hottest:.2f}",
        hottest <= _MAX_KNOWN_TOKENS,
    )


def _ratio(quality: Rows, placement: str, split: str) -> float:
    return float(next(row[split] for row in quality if row["placement"] == placement))


def _at_most(name: str, limit: float, found: float) -> Target:
    return Target(name, f"at most {limit:g}", f"{found:.3f}", round(found, 3) <= limit)


PARTS = {
    "recorded": _recorded,
    "drawn": _drawn,
    "decisions": _decisions,
    "cost": _cost,
    "exact": _exact,
    "example": _example,
}

if __name__ == "__main__":
    main()
