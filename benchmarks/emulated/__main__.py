"""Measure the time that balancers save: ``python -m benchmarks.emulated``.

Real ranks serve the embedded model with a real service, real votes and real transfers. Each rank emulates a device: it
sleeps for the time that a shipped cost curve gives for the tokens in its slots. A step therefore takes as long as its
hottest rank. Every step also runs through an unbalanced copy of the model. The balancers are the service's own planner
and DeepSeek's EPLB, called once per window, as vLLM and SGLang call it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eplb_lab.demo.scoreboard import Scoreboard
from eplb_lab.demo.stage import DEVICE_TOKENS, Stage, device_text, model_sizes, perform
from eplb_lab.demo.summary import complaint

_REQUESTS = 32
_REQUEST_BYTES = 96
_WINDOW = 64
_INTERVAL = 32
_BALANCERS = {
    "engine's own EPLB": {"policy": "deepseek", "interval": _WINDOW},
    "eplb-service": {"policy": "flashlb", "interval": _INTERVAL},
}
LEFT_ALONE = "left alone"


def main() -> int:
    """Serve every seed once per balancer and print the table. Return 1 if balancing changes the outputs."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    layers, experts, _ = model_sizes()
    stage = Stage(
        steps=options.steps,
        layers=layers,
        experts=experts,
        ranks=options.ranks,
        redundant=options.redundant,
        dispatcher="all2allv",
        split="tables",
        window=_WINDOW,
        interval=_INTERVAL,
        policy="flashlb",
        seed=0,
    )
    rows: dict[str, list[dict[str, float]]] = {LEFT_ALONE: [], **{name: [] for name in _BALANCERS}}
    problems = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("serving", total=len(_BALANCERS) * len(options.seeds) * stage.steps)
        for seed in options.seeds:
            for name, overrides in _BALANCERS.items():
                board = _served(replace(stage, seed=seed, **overrides), lambda: progress.advance(task))
                rows[name].append(_figures(board, "live"))
                problem = complaint(board, stage)
                if problem is not None:
                    problems.append(f"{name}, seed {seed}: {problem}")
            rows[LEFT_ALONE].append(_figures(board, "still"))
    console.print(table(rows))
    console.print(f"Step times are {device_text()}. They include the agent's measured time.")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rows": rows, "device": device_text(), "seeds": options.seeds}, indent=1)
        )
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--steps", type=int, default=720, help="steps per run (720 take about two minutes)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="request seeds")
    parser.add_argument("--ranks", type=int, default=4, help="number of rank processes")
    parser.add_argument("--redundant", type=int, default=8, help="redundant experts per layer")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def _served(stage: Stage, on_step: Callable[[], None]) -> Scoreboard:
    """Serve the embedded model for one run and return its scoreboard."""
    orders = {"steps": stage.steps, "rows": _REQUESTS, "length": _REQUEST_BYTES}
    orders |= {"layers": stage.layers, "experts": stage.experts}
    seen = 0

    def watch(board: Scoreboard, _: str) -> None:
        nonlocal seen
        while seen < board.steps:
            seen += 1
            on_step()

    return perform(stage, "eplb_lab.ranks.model_rank", orders, watch)


def _figures(board: Scoreboard, model: str) -> dict[str, float]:
    """Return one model's milliseconds per token, PAR and moves over the whole run."""
    step_ms = board.milliseconds(model)
    if model == "live":
        step_ms = step_ms + board.milliseconds("agent")
    p50, p99 = np.quantile(step_ms, [0.5, 0.99])
    mean = float(step_ms.mean())
    return {
        "mean_ms": mean,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "agent_ms": float(board.milliseconds("agent").mean()) if model == "live" else 0.0,
        "tokens_per_second": DEVICE_TOKENS * board.tokens_per_second(mean, 0),
        "par": board.par(model, 0),
        "moves": float(board.total("experts_received")) if model == "live" else 0.0,
    }


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Return a table of medians over the seeds, with the range of the mean time.

    Parameters
    ----------
    rows
        Figures for each seed, keyed by balancer. ``LEFT_ALONE`` must be one of the keys.
    """
    shown = Table(title="Time per token", title_justify="left")
    for column in (
        "",
        "mean ms (range)",
        "p50 ms",
        "p99 ms",
        "agent's share, ms",
        "tokens/s",
        "faster",
        "PAR",
        "experts moved",
    ):
        shown.add_column(column, justify="left" if not column else "right")
    unbalanced = statistics.median(row["tokens_per_second"] for row in rows[LEFT_ALONE])
    for name, seeds in rows.items():
        medians = {key: statistics.median(row[key] for row in seeds) for key in seeds[0]}
        means = [row["mean_ms"] for row in seeds]
        shown.add_row(
            name,
            f"{medians['mean_ms']:.1f} ({min(means):.1f} to {max(means):.1f})",
            f"{medians['p50_ms']:.1f}",
            f"{medians['p99_ms']:.1f}",
            f"{medians['agent_ms']:.2f}",
            f"{medians['tokens_per_second']:,.0f}",
            f"{medians['tokens_per_second'] / unbalanced - 1:+.1%}",
            f"{medians['par']:.3f}",
            f"{medians['moves']:.0f}",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
