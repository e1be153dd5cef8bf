"""Simulate agents, their engine and the service under randomly drawn faults.

``python -m tests.simulation --seed 7`` replays one run and prints its log. ``--seeds 500`` runs many seeds and lists
the ones that violate a guarantee.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.world import Outcome, World, simulate


def runs(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Run many seeds in parallel on the cores that this process may use."""
    # A forked process inherits garbage. Collecting an object that has a thread in the parent can hang: gRPC's poller
    # waits forever for its thread.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        yield from pool.map(simulate, seeds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay the run with this seed and print its log")
    parser.add_argument("--seeds", type=int, default=100, help="number of runs")
    parser.add_argument("--first", type=int, default=1, help="seed of the first run")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = World(arguments.seed).run()
        for moment, who, what in outcome.log:
            print(f"{moment:10.4f}  {who:10} {what}")
        print(outcome._replace(log=()))
        sys.exit(bool(outcome.breaches))
    began = time.perf_counter()
    failed = []
    seconds = 0.0
    faults = 0
    for count, outcome in enumerate(runs(range(arguments.first, arguments.first + arguments.seeds)), 1):
        seconds, faults = seconds + outcome.seconds, faults + outcome.faults
        if outcome.breaches:
            failed.append(outcome.seed)
            print(f"\nmake simulate ARGS='--seed {outcome.seed}': {'; '.join(outcome.breaches)}")
        rate = f"{faults} faults in {seconds / 3600:.1f} simulated hours, {time.perf_counter() - began:.0f} s elapsed"
        print(f"\r{count} runs, {len(failed)} failed: {rate} ", end="", flush=True)
    print(f"\nfailed seeds: {failed}" if failed else "")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
