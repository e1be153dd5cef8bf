"""Serve for minutes under random faults, then check the recorded histories for violated guarantees.

For half of the time, one group of ranks serves with hosts that run ahead of their devices. Its memory and file
descriptors must not grow. Further groups serve for a minute each. Their ranks start late and leave in any order, and
most of their hosts also run ahead. Every output is compared with the output of a layer that is never switched.

Run ``python -m tests.faults.soak [--seconds 600] [--seed N]`` or ``make soak``. The seed is printed; the same seed
requests the same faults in the same order. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc

from eplb_lab.history.check import read_histories
from tests.faults.scene import PATIENCE, RANKS, Scene
from tests.faults.serving import AHEAD, Facts, Manners, check_served

LONGEST_STEP = 60.0
"""Longest allowed step in seconds. A sleeping or frozen rank delays votes and the model equally.

No other fault may delay a step.
"""
KINDS = ("vote", "transfer", "commit", "abort")
SHORT_ROUND = 60.0
VOTE_TIMEOUT = 5.0
MORE_MEGABYTES = 40.0
MORE_FILES = 24
MORE_THREADS = 12
"""Allowed growth of the three medians between the second and the last quarter of a long round.

It leaves room for links that are just being closed.
"""


def cut_streams(scene: Scene, random_: random.Random) -> None:
    for _ in range(random_.randint(1, 4)):
        scene.proxy.cut()
        time.sleep(random_.uniform(0, 0.5))


def delay_streams(scene: Scene, random_: random.Random) -> None:
    scene.proxy.delay = random_.uniform(0.02, 0.3)
    time.sleep(random_.uniform(1, 4))
    scene.proxy.delay = 0.0


def swallow_streams(scene: Scene, random_: random.Random) -> None:
    scene.proxy.swallow = True
    time.sleep(random_.uniform(0.5, 8))
    scene.proxy.swallow = False


def miss_calls(scene: Scene, random_: random.Random) -> None:
    for _ in range(random_.randint(3, 12)):
        scene.ask(random_.choice(["miss-call", "double-call"]), random_.randrange(RANKS))
        time.sleep(random_.uniform(0, 0.1))


def _on_a_rank(fault: str) -> Callable[[Scene, random.Random], None]:
    return lambda scene, random_: scene.ask(fault, random_.randrange(RANKS))


FAULTS: dict[str, Callable[[Scene, random.Random], None]] = {
    "kill the service": lambda scene, random_: scene.service.restart(random_.uniform(0, 3)),
    "freeze the service": lambda scene, random_: scene.service.freeze(random_.uniform(0.5, 5)),
    "cut the streams": cut_streams,
    "delay the streams": delay_streams,
    "block the streams": swallow_streams,
    "a rank sleeps": _on_a_rank("sleep"),
    "a transfer fails": _on_a_rank("fail-next-transfer"),
    "a transfer stalls": _on_a_rank("stall-next-transfer"),
    "an expert arrives damaged": _on_a_rank("corrupt-next-transfer"),
    "a stream's thread dies": _on_a_rank("kill-stream-thread"),
    "a host misses a call": _on_a_rank("miss-call"),
    "a host calls twice": _on_a_rank("double-call"),
    "hosts miss calls": miss_calls,
    "a rank stalls past the vote deadline": _on_a_rank("stall"),
    "a rank's link is lost": _on_a_rank("lose-votes"),
    "a rank is frozen": lambda scene, random_: scene.freeze(
        random_.randrange(RANKS), random_.uniform(0.2, 4)
    ),
}


def _known(scene: Scene) -> str:
    try:
        return f"epoch {scene.epoch}"
    except grpc.RpcError:
        return "no rank has reconnected yet"


def serve_round(
    folder: Path, seconds: float, random_: random.Random, manners: Manners
) -> tuple[Counter[str], list[Facts]]:
    """Serve with a fault every few seconds. Return the injected faults and the ranks' facts."""
    done: Counter[str] = Counter()
    with Scene(
        folder,
        store=random_.random() < 0.5,
        deadline=seconds + 3 * PATIENCE,
        manners=manners,
        bytes_per_step=random_.choice([None, 4000]),
        transfer_timeout_seconds=2.0,
        vote_timeout_seconds=VOTE_TIMEOUT,
        commit_timeout_seconds=1.0,
        verify_transfers=True,
        offer_deadline_steps=64,
    ) as scene:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = random_.choice(list(FAULTS))
            print(f"{end - time.monotonic():6.0f} s left, {_known(scene)}: {name}", flush=True)
            FAULTS[name](scene, random_)
            done[name] += 1
            time.sleep(random_.uniform(0.5, 4))
        scene.proxy.cut()
        scene.wait_for_ranks()
        (folder / "calm").touch()
        scene.wait_for_switches()
        facts = scene.stop()
    check_served(facts, folder, LONGEST_STEP)
    halted = [fact.halted for fact in facts if fact.halted is not None]
    if halted:
        raise AssertionError(f"balancing has stopped: {halted}")
    return done, facts


def check_flat(facts: list[Facts]) -> None:
    """Check that no rank uses noticeably more memory, files or threads in the last quarter than in the second."""
    for rank, fact in enumerate(facts):
        quarter = len(fact.samples) // 4
        if not quarter:
            continue
        early = fact.samples[quarter : 2 * quarter]
        late = fact.samples[-quarter:]
        for what, limit in (("megabytes", MORE_MEGABYTES), ("files", MORE_FILES), ("threads", MORE_THREADS)):
            before, after = (
                statistics.median(getattr(sample, what) for sample in part) for part in (early, late)
            )
            if after - before > limit:
                raise AssertionError(
                    f"rank {rank} uses {after:g} {what} in the last quarter, but used {before:g} in the second"
                )


def soak(folder: Path, seconds: float, seed: int) -> tuple[Counter[str], list[list[Facts]]]:
    """Run all rounds. Return the injected faults, and the ranks' facts from each round."""
    random_ = random.Random(seed)
    done: Counter[str] = Counter()
    rounds: list[list[Facts]] = []
    end = time.monotonic() + seconds
    while not rounds or time.monotonic() < end:
        round_folder = folder / f"round-{len(rounds)}"
        round_folder.mkdir()
        manners = Manners(ahead=AHEAD)
        if rounds:
            late = [random_.choice([0.0, random_.uniform(0, 2 * VOTE_TIMEOUT)]) for _ in range(RANKS)]
            exits = [random_.choice([0.0, random_.uniform(0, 2)]) for _ in range(RANKS)]
            manners = Manners(late, exits, random_.choice([(), AHEAD, AHEAD[::-1]]))
        length = seconds / 2 if not rounds else min(SHORT_ROUND, max(5.0, end - time.monotonic()))
        print(f"round {len(rounds)}, {length:.0f} s: {manners}", flush=True)
        counts, facts = serve_round(round_folder, length, random_, manners)
        done += counts
        rounds.append(facts)
    check_flat(rounds[0])
    return done, rounds


def main() -> None:
    """Run the soak test, check the results, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="time to serve, in seconds (default: 600)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the random faults (default: taken from the clock)"
    )
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="eplb-soak-") as folder:
        try:
            done, rounds = soak(Path(folder), arguments.seconds, seed)
        except AssertionError as broken:
            print(f"FAILED with seed {seed}: {broken}")
            sys.exit(1)
        counts: Counter[str] = Counter()
        for round_folder in Path(folder).glob("round-*"):
            for ranks in read_histories(round_folder / "history").values():
                counts.update({kind: len(ranks[0].of(kind)) for kind in KINDS})
    facts = [fact for round_ in rounds for fact in round_]
    summary = {
        "seed": seed,
        "seconds": arguments.seconds,
        "rounds": len(rounds),
        "steps": sum(round_[0].steps for round_ in rounds),
        **counts,
        "faults": dict(done),
        "worst_output_difference": max(fact.worst for fact in facts),
        "longest_step_seconds": max(fact.longest_step for fact in facts),
    }
    print(json.dumps(summary, indent=1))
    print("no guarantee was violated")


if __name__ == "__main__":
    main()
