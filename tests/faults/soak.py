"""Serves for minutes under random faults, then proves from the recorded histories that no promise was broken.

``python -m tests.faults.soak [--seconds 600] [--seed N]``, or ``make soak``. The seed is printed: the same one asks for
the same faults in the same order. Exit code 1 where anything was broken.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc

from tests.faults.scene import PATIENCE, RANKS, Scene
from tests.faults.serving import Facts, check_served
from worker_agent.history.check import read_histories

LONGEST_STEP = 5.0
"""A rank that sleeps two seconds holds the others' votes up as it holds up the model; nothing may take longer."""


def kill_service(scene: Scene, random_: random.Random) -> None:
    scene.service.kill()
    time.sleep(random_.uniform(0, 3))
    scene.service.start()


def freeze_service(scene: Scene, random_: random.Random) -> None:
    scene.service.freeze()
    time.sleep(random_.uniform(0.5, 5))
    scene.service.thaw()


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


def _on_a_rank(fault: str) -> Callable[[Scene, random.Random], None]:
    return lambda scene, random_: scene.ask(fault, random_.randrange(RANKS))


FAULTS: dict[str, Callable[[Scene, random.Random], None]] = {
    "kill the service": kill_service,
    "freeze the service": freeze_service,
    "cut the streams": cut_streams,
    "delay the streams": delay_streams,
    "swallow the streams": swallow_streams,
    "a rank sleeps": _on_a_rank("sleep"),
    "a transfer fails": _on_a_rank("fail-next-transfer"),
    "a transfer stalls": _on_a_rank("stall-next-transfer"),
    "an expert arrives damaged": _on_a_rank("corrupt-next-transfer"),
    "a stream's thread dies": _on_a_rank("kill-stream-thread"),
}


def _known(scene: Scene) -> str:
    try:
        return f"epoch {scene.epoch}"
    except grpc.RpcError:
        return "no rank is back yet"


def soak(folder: Path, seconds: float, seed: int) -> tuple[Counter[str], list[Facts]]:
    """Serve with a fault every few seconds; what was done, and what the ranks saw."""
    random_ = random.Random(seed)
    done: Counter[str] = Counter()
    with Scene(
        folder,
        store=random_.random() < 0.5,
        deadline=seconds + 3 * PATIENCE,
        bytes_per_step=random_.choice([None, 4000]),
        transfer_timeout_seconds=2.0,
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
        scene.wait_for_switches()
        facts = scene.stop()
    return done, facts


def main() -> None:
    """Run, check, and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long to serve (600)")
    parser.add_argument("--seed", type=int, default=None, help="draws the faults (by default from the clock)")
    parser.add_argument("--json", type=Path, default=None, help="write a summary here")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="eplb-soak-") as folder:
        try:
            done, facts = soak(Path(folder), arguments.seconds, seed)
            check_served(facts, Path(folder), LONGEST_STEP)
            halted = [fact.halted for fact in facts if fact.halted is not None]
            if halted:
                raise AssertionError(f"balancing has stopped: {halted}")
        except AssertionError as broken:
            print(f"BROKEN with seed {seed}: {broken}")
            sys.exit(1)
        (ranks,) = read_histories(Path(folder) / "history").values()
        counts = {kind: len(ranks[0].of(kind)) for kind in ("vote", "transfer", "commit", "abort")}
    summary = {
        "seed": seed,
        "seconds": arguments.seconds,
        "steps": facts[0].steps,
        **counts,
        "faults": dict(done),
        "worst_output_difference": max(fact.worst for fact in facts),
        "longest_step_seconds": max(fact.longest_step for fact in facts),
    }
    print(json.dumps(summary, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    print("every promise was kept")


if __name__ == "__main__":
    main()
