"""Run mutation tests on one package with cosmic-ray, and print the mutants that its tests miss: ``make mutate``.

The mutants are created in a copy of the tree. ``--sample`` sets their number, and ``--seed`` selects them.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

ROOT = Path(__file__).parent.parent
ROOMS = {
    "control": ("eplb_service/control", "tests/control"),
    "planner": ("eplb_core/planner", "tests/planner"),
    "solver": ("eplb_core/solver", "tests/solver"),
    "swap": ("worker_agent/swap", "tests/swap"),
    "wire": ("eplb_core/wire", "tests/wire"),
}
"""Source directory and test directory of each package."""
REPORT = "from cosmic_ray.tools.report import report; report()"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "site", "dist", "build", ".mypy_cache", ".hypothesis")


def main() -> None:
    """Mutate the package given on the command line and print cosmic-ray's report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", choices=ROOMS, default="planner")
    parser.add_argument("--sample", type=int, default=40, help="number of mutants (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the sample (default: 0)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="time limit for the tests of each mutant, in seconds (default: 600)",
    )
    arguments = parser.parse_args()
    source, tests = ROOMS[arguments.room]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        (copy / "mutate.toml").write_text(configuration(source, tests, arguments.timeout))
        cosmic_ray(copy, "init", "mutate.toml", "mutants.sqlite")
        with use_db(str(copy / "mutants.sqlite"), mode=WorkDB.Mode.open) as database:
            skip_all_but(database, arguments.sample, arguments.seed)
        cosmic_ray(copy, "exec", "mutate.toml", "mutants.sqlite")
        subprocess.run(
            [sys.executable, "-c", REPORT, "--show-diff", "--surviving-only", "mutants.sqlite"],
            cwd=copy,
            check=True,
        )


def configuration(source: str, tests: str, timeout: float) -> str:
    """Return a cosmic-ray configuration with which the tests import the copy instead of the installed package."""
    command = f"env PYTHONPATH=. {sys.executable} -m pytest -x -q {tests}"
    return (
        f'[cosmic-ray]\nmodule-path = "{source}"\ntimeout = {timeout}\nexcluded-modules = ["**/generated/*"]\n'
        f'test-command = "{command}"\n[cosmic-ray.distributor]\nname = "local"\n'
    )


def skip_all_but(database: WorkDB, sample: int, seed: int) -> None:
    """Mark every mutant outside a random sample as skipped."""
    jobs = sorted(item.job_id for item in database.work_items)
    kept = set(random.Random(seed).sample(jobs, min(sample, len(jobs))))  # noqa: S311, a sample, not a secret
    for job in jobs:
        if job not in kept:
            database.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def cosmic_ray(folder: Path, *arguments: str) -> None:
    """Run one cosmic-ray command in a directory."""
    subprocess.run([sys.executable, "-m", "cosmic_ray.cli", *arguments], cwd=folder, check=True)


if __name__ == "__main__":
    main()
