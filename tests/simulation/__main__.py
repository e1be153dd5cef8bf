"""Simulates agents, their engine and a service under faults drawn from seeds.

``python -m tests.simulation --seed 7`` replays one run and prints its story; ``--seeds 500`` makes many runs and names
those that broke a promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.world import Outcome, World

_PROCESSES = 2


def simulate(seed: int) -> Outcome:
    """One run, without its story."""
    return World(seed).run()._replace(log=())


def runs(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Runs of many seeds, on some processes."""
    with ProcessPoolExecutor(_PROCESSES) as pool:
        yield from pool.map(simulate, seeds)


def replay(seed: int) -> bool:
    """Print the story of one run; return whether all promises were kept."""
    outcome = World(seed).run()
    for moment, who, what in outcome.log:
        print(f"{moment:10.4f}  {who:10} {what}")
    print(f"seed {seed}: {_summary(outcome)}, fingerprint {outcome.fingerprint}")
    return not outcome.breaches


def many(first: int, number: int) -> bool:
    """Make runs with a line of progress; return whether all promises were kept."""
    began = time.perf_counter()
    failed, hours, passes, plans = [], 0.0, 0, 0
    for count, outcome in enumerate(runs(range(first, first + number)), 1):
        hours, passes, plans = hours + outcome.seconds / 3600, passes + outcome.passes, plans + outcome.plans
        minutes = (time.perf_counter() - began) / 60
        if outcome.breaches:
            failed.append(outcome.seed)
            print(f"\rseed {outcome.seed}: {_summary(outcome)}")
            print(f"    .venv/bin/python -m tests.simulation --seed {outcome.seed}")
        print(
            f"\r{count} runs, {len(failed)} failed: {hours:.1f} hours, {passes} passes, {plans} plans, "
            f"{hours / minutes:.1f} hours a minute ",
            end="",
            flush=True,
        )
    print()
    if failed:
        print(f"failed seeds: {failed}")
    return not failed


def _summary(outcome: Outcome) -> str:
    said = (
        "; ".join(outcome.breaches)
        or f"all promises kept, balance was back after {outcome.healed_after:.0f} s"
    )
    return f"{outcome.faults} faults in {outcome.seconds:.0f} s, {outcome.plans} plans: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this run and print its story")
    parser.add_argument("--seeds", type=int, default=100, help="number of runs")
    parser.add_argument("--first", type=int, default=1, help="seed of the first of them")
    arguments = parser.parse_args()
    kept = replay(arguments.seed) if arguments.seed is not None else many(arguments.first, arguments.seeds)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
