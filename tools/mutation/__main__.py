"""Do the tests of a room notice small defects? ``make mutate`` or ``python -m tools.mutation --room planner --seed 1``.

Draws mutants of the room's modules (a comparison, sum, boolean, condition, constant or return that is wrong), and runs
the room's tests on each in a copy of the tree, to the first failure. A mutant that no test notices has survived: a test
is missing there, or the mutant means the same as the original. Prints every verdict, and how many were killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.mutation.sites import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".*_cache", ".hypothesis", ".peers")


@dataclass(frozen=True)
class Room:
    """Modules, and the tests that should notice what is wrong in them.

    Attributes
    ----------
    sources, tests : tuple of str
        Folders or files; those that a tree lacks are passed over.
    leave_out : tuple of str
        Names of test files that are not run: slow ones, and ones that look at the sources instead of running them.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    leave_out: tuple[str, ...] = ()


ROOMS = {
    "swap": Room(("worker_agent/swap",), ("tests/swap", "tests/agent")),
    "planner": Room(("eplb_service/planner",), ("tests/planner",)),
    "solver": Room(("eplb_service/solver",), ("tests/solver",), ("test_jit.py",)),
}


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: killed, timeout (killed as well) or survived."""

    room: str
    path: str
    line: int
    kind: str
    before: str
    after: str
    outcome: str
    seconds: float


def main() -> None:
    """Exit code 0 whatever survives, 2 where the tests fail without any mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--room", choices=ROOMS, action="append", help="this one alone; may be repeated")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each room (20); 0 is all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to look at (this one)")
    parser.add_argument("--json", type=Path, default=None, help="write all verdicts here")
    arguments = parser.parse_args()
    # Ended from outside, as by a time limit, it leaves neither copies nor tests that run on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    verdicts: list[Verdict] = []
    for name in arguments.room or ROOMS:
        verdicts += judge_room(name, arguments.root.resolve(), arguments.sample, arguments.seed)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")


def judge_room(name: str, root: Path, sample: int, seed: int) -> list[Verdict]:
    """Draw mutants of a room and run its tests on each; prints as it goes."""
    room = ROOMS[name]
    found = [(path, mutant) for path in modules(room, root) for mutant in mutants(path.read_text())]
    drawn = random.Random(seed).sample(found, min(sample or len(found), len(found)))
    print(f"{name}: {len(drawn)} of {len(found)} mutants, seed {seed}", flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="eplb-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, ignore=NOT_COPIED, symlinks=True)
        tests = test_files(room, tree)
        began = time.monotonic()
        if run_tests(tests, tree, seconds=3600) != "survived":
            print(f"{name}: the tests fail without any mutant; first make them pass", file=sys.stderr)
            sys.exit(2)
        most_seconds = 60 + 4 * (time.monotonic() - began)
        for path, mutant in drawn:
            verdict = judge(name, path.relative_to(root), mutant, tests, tree, most_seconds)
            verdicts.append(verdict)
            change = f"{mutant.before} -> {mutant.after}".replace("\n", " ")
            print(f"  {verdict.outcome:8} {verdict.path}:{verdict.line} {change}", flush=True)
    survived = sum(verdict.outcome == "survived" for verdict in verdicts)
    print(f"{name}: {len(verdicts) - survived} of {len(verdicts)} mutants killed", flush=True)
    return verdicts


def modules(room: Room, root: Path) -> list[Path]:
    """The room's modules, in order of their names."""
    places = [root / source for source in room.sources]
    return sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*.py")))


def test_files(room: Room, tree: Path) -> list[Path]:
    """The room's test files, in order of their names."""
    found = [path for place in room.tests for path in (tree / place).rglob("test_*.py")]
    return sorted(path for path in found if path.name not in room.leave_out)


def judge(
    room: str, path: Path, mutant: Mutant, tests: list[Path], tree: Path, most_seconds: float
) -> Verdict:
    """Put one mutant in the tree, run the tests, those named like its module first, and take it out again."""
    place = tree / path
    original = place.read_text()
    namesakes_first = sorted(tests, key=lambda test: place.stem.strip("_") not in test.stem)
    began = time.monotonic()
    place.write_text(mutant.source)
    try:
        outcome = run_tests(namesakes_first, tree, most_seconds)
    finally:
        place.write_text(original)
    seconds = round(time.monotonic() - began, 1)
    return Verdict(room, str(path), mutant.line, mutant.kind, mutant.before, mutant.after, outcome, seconds)


def run_tests(tests: list[Path], tree: Path, seconds: float) -> str:
    """survived, killed, or timeout: a mutant that never ends has been noticed too."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    running = subprocess.Popen(
        [*command, "--hypothesis-seed", "0", *map(str, tests)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "survived" if running.wait(seconds) == 0 else "killed"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        # The ranks and services that a test started end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


if __name__ == "__main__":
    main()
