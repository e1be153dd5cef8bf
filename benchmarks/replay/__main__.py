"""Replays a long trace by a plain single-threaded loop and by `eplb replay`, side by side: ``make bench-replay``.

Each run is a process of its own, and the ways take turns. Reported are the time of each, the ratio of the plain
loop's to that of two processes pair by pair, the part of the time spent in the solver, and the most memory held,
summed over processes. All ways must find the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.heat import EXPERTS, LAYERS, write_heat
from benchmarks.replay.memory import PeakMemory
from benchmarks.replay.one_run import POLICIES, RANKS, SLOTS, STEPS

WAYS = {"plain": "plain loop, one thread", "1": "eplb replay, one process", "2": "eplb replay, two processes"}
_SAME = 1e-9


def main() -> None:
    """Print one line a run, then the ratios; exit code 1 where a way finds something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the trace (10000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each way takes (3)")
    parser.add_argument("--trace", type=Path, help="replay this trace instead of one made for the purpose")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eplb-bench-") as folder:
        trace = options.trace or Path(folder) / "heat.zarr"
        if options.trace is None:
            write_heat(trace, options.steps)
        runs = list(_runs(trace, options.rounds))
    found = _figures(runs)
    print(f"{', '.join(POLICIES)} and hindsight; window and interval {STEPS}, {RANKS} ranks x {SLOTS} slots")
    if options.trace is None:
        print(f"{options.steps} steps x {LAYERS} layers x {EXPERTS} experts")
    for name, value in found.items():
        print(f"{name:<58}{value}")
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": runs, "figures": found}, indent=1) + "\n")
    sys.exit(not _agree(runs))


def _runs(trace: Path, rounds: int) -> Iterator[dict[str, Any]]:
    for number in range(rounds):
        for way, title in WAYS.items():
            command = [sys.executable, "-m", "benchmarks.replay.one_run", way, str(trace)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            memory = PeakMemory(process.pid)
            reported, _ = process.communicate(timeout=3600)
            peak = memory.stop()
            if process.returncode:
                sys.exit(f"{title} failed")
            run = {"round": number, "way": way, "peak_mib": peak / 2**20, **json.loads(reported)}
            print(
                f"round {number + 1}: {title:<28}{run['seconds']:8.1f} s {run['peak_mib']:8.0f} MiB",
                flush=True,
            )
            yield run


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    def of(way: str, name: str) -> list[float]:
        return [run[name] for run in runs if run["way"] == way]

    ratios = [plain / two for plain, two in zip(of("plain", "seconds"), of("2", "seconds"), strict=True)]
    shares = [
        inside / whole for inside, whole in zip(of("1", "solver_seconds"), of("1", "seconds"), strict=True)
    ]
    return {
        "plain loop / two processes, time": _spread(ratios, "{:.2f}"),
        "plain loop / one process, time": _spread(
            [plain / one for plain, one in zip(of("plain", "seconds"), of("1", "seconds"), strict=True)],
            "{:.2f}",
        ),
        "in the solver, of one process's time": _spread(shares, "{:.0%}"),
        "peak memory of one process, MiB": _spread(of("1", "peak_mib"), "{:.0f}"),
        "peak memory of two processes and their parent, MiB": _spread(of("2", "peak_mib"), "{:.0f}"),
    }


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def _agree(runs: Sequence[dict[str, Any]]) -> bool:
    first = runs[0]["par"]
    agreed = all(abs(run["par"][name] - first[name]) < _SAME for run in runs for name in first)
    print(
        "all ways found the same PAR: " + ", ".join(f"{name} {par:.3f}" for name, par in first.items())
        if agreed
        else "THE WAYS FOUND DIFFERENT THINGS"
    )
    return agreed


if __name__ == "__main__":
    main()
