"""Replays a long trace by a plain single-threaded loop and by `eplb replay`, side by side: ``make bench-replay``.

Each run is a process of its own, and the ways take turns. Reported are the time of each, the ratio of the plain loop's
to that of `eplb replay` pair by pair, and the most memory held, summed over processes. All ways must find the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eplb_service.heat.window import Window
from eplb_service.io.named_arrays import ReadAs
from eplb_service.io.native import TraceWriter
from eplb_service.io.trace import Trace, TraceFacts
from eplb_service.placement import Placement, apply_layers, par
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.score import rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.jobs import TraceFile, jobs_for, replay_file, scene_for
from eplb_service.replay.policy import Setup
from eplb_service.solver.warmup import warm_up

LAYERS, EXPERTS, CHOICES = 58, 256, 4096 * 8
RANKS, SLOTS, STEPS = 32, 9, 256
POLICIES = ("none", "deepseek", "flashlb")
WAYS = {"plain": "plain loop, one thread", "1": "eplb replay, one process", "2": "eplb replay, two processes"}


def main() -> None:
    """Print one line a run, then the ratios; exit code 1 where a way finds something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the trace (10000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each way takes (3)")
    parser.add_argument("--trace", type=Path, help="replay this trace instead of one made for the purpose")
    parser.add_argument("--way", choices=WAYS, help="make one run in this process and report it as JSON")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(one_run(options.way, TraceFile(options.trace, ReadAs()))))
        return
    with tempfile.TemporaryDirectory(prefix="eplb-bench-") as folder:
        trace = options.trace or write_heat(Path(folder) / "heat.zarr", options.steps)
        runs = [started(way, trace) for _ in range(options.rounds) for way in WAYS]
    print(f"{', '.join(POLICIES)} and hindsight; window and interval {STEPS}, {RANKS} ranks x {SLOTS} slots")
    plain = [run["seconds"] for run in runs if run["way"] == "plain"]
    for way, title in WAYS.items():
        mine = [run for run in runs if run["way"] == way]
        ratios = [whole / run["seconds"] for whole, run in zip(plain, mine, strict=True)]
        print(f"{title:<28} plain loop's time / its own: {spread(ratios, '{:.2f}')}", end="; ")
        print(f"peak memory, MiB: {spread([run['peak_mib'] for run in mine], '{:.0f}')}")
    first = runs[0]["par"]
    agreed = all(np.allclose(run["par"][name], first[name], atol=1e-9) for run in runs for name in first)
    print("all ways found the same" if agreed else "THE WAYS FOUND DIFFERENT THINGS", first)
    sys.exit(not agreed)


def started(way: str, trace: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.replay", "--way", way, "--trace", str(trace)]
    run = {"way": way, **json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)}
    print(f"{WAYS[way]:<28}{run['seconds']:8.1f} s {run['peak_mib']:8.0f} MiB", flush=True)
    return run


def one_run(way: str, file: TraceFile) -> dict[str, Any]:
    """Time, memory and findings of one way."""
    warm_up(1)
    began = time.perf_counter()
    if way == "plain":
        found = plain_loop(file.open())
    else:
        jobs = jobs_for(POLICIES, [Setup(SLOTS, STEPS, STEPS)], PlannerSettings())
        replayed = replay_file(file, jobs, scene_for(RANKS), workers=int(way))
        found = {policy.label: policy.par_realised for policy in replayed.policies}
        [baseline] = replayed.baselines
        fitted_DL = baseline.rows("hindsight_L")
        assert fitted_DL is not None
        steps_D = [decision.steps for decision in baseline.decisions]
        found["hindsight"] = float(np.average(fitted_DL.mean(axis=1), weights=steps_D))
    seconds = time.perf_counter() - began
    own, child = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    children = 0 if way in ("plain", "1") else int(way)
    return {"seconds": seconds, "peak_mib": (own + children * child) / 1024, "par": found}


def plain_loop(trace: Trace) -> dict[str, float]:
    """The replay that one would write in an hour: mean PAR that each policy realises, and hindsight."""
    topology, found = Topology.flat(RANKS), {}
    first = Placement.linear(trace.layers, trace.experts, RANKS, SLOTS)
    for policy in (*POLICIES, "hindsight"):
        placement, tables_RLE, realised, weights = first, first.default_log2phy(), [], []
        for step in range(STEPS, trace.steps, STEPS):
            served = Window(trace.heat(step, min(step + STEPS, trace.steps)))
            if policy == "hindsight":
                made = plan_afresh(served, first, topology, PlannerSettings(threads=1))
                placement, tables_RLE = apply_layers(first, first.default_log2phy(), made.changes())
            else:
                seen, settings = (
                    Window(trace.heat(step - STEPS, step)),
                    PlannerSettings(policy=policy, threads=1),
                )
                made = plan(seen, placement, tables_RLE, topology, settings)
                placement, tables_RLE = apply_layers(placement, tables_RLE, made.changes())
            realised.append(par(rank_loads(served.heat_TLE, placement, tables_RLE)).mean())
            weights.append(served.steps)
        found[policy] = float(np.average(realised, weights=weights))
    return found


def write_heat(path: Path, steps: int, piece: int = 64) -> Path:
    """Write a native trace whose popularities drift, each count a Poisson draw, a piece at a time."""
    rng = np.random.default_rng(0)
    base_LE = 0.9 * rng.standard_normal((LAYERS, EXPERTS))
    walk_LE = np.zeros_like(base_LE)
    with TraceWriter(path, TraceFacts(origin="synthetic, slow drift"), LAYERS, EXPERTS) as writer:
        for first in range(0, steps, piece):
            walk_LE = 0.97 * walk_LE + 0.04 * np.sqrt(piece) * rng.standard_normal(walk_LE.shape)
            popularity_LE = np.exp(base_LE + walk_LE)
            share_LE = popularity_LE / popularity_LE.sum(axis=1, keepdims=True)
            shape = min(piece, steps - first), LAYERS, EXPERTS
            writer.append(rng.poisson(CHOICES * share_LE, shape).astype(np.uint32))
    return path


def spread(values: Sequence[float], form: str) -> str:
    """Median, least and most."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
