"""Run every property test on random examples: ``make fuzz-properties`` or ``python -m tests.properties --seed 7``.

The gate runs each property test on the same examples every time. This command draws many more from a seed, which it
prints. Pass that seed again to reproduce a counterexample. Keep each counterexample as an ``@example`` beside its test.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 1 << 32


def main() -> None:
    """Print the seed, run the tests, and exit with pytest's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the examples (default: taken from the clock)"
    )
    parser.add_argument(
        "--times", type=int, default=40, help="multiple of the gate's number of examples (default: 40)"
    )
    parser.add_argument(
        "--processes", default="auto", help="number of parallel processes (default: one per core)"
    )
    parser.add_argument(
        "tests", nargs="*", default=["tests"], help="test files, folders or names (default: all)"
    )
    arguments = parser.parse_args()
    seed = time.time_ns() % SEEDS if arguments.seed is None else arguments.seed
    again = f"--seed {seed} --times {arguments.times} {shlex.join(arguments.tests)}"
    print(f'seed {seed}; to reproduce: make fuzz-properties ARGS="{again}"', flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.properties", "-m", "hypothesis"]
    command += ["--timeout", "3600", "--hypothesis-profile", "explore", "--hypothesis-seed", str(seed)]
    command += ["--examples-times", str(arguments.times), "-n", arguments.processes, "--dist", "worksteal"]
    done = subprocess.run([*command, *arguments.tests], cwd=ROOT, check=False)
    print(f"seed {seed}: {'no counterexample found' if done.returncode == 0 else 'failed, see above'}")
    sys.exit(done.returncode)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that multiplies examples."""
    parser.addoption("--examples-times", type=int, default=1, help="multiply every property test's examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the number of examples of every property test."""
    seen = set()
    for item in items:
        test: Any = getattr(item, "obj", None)
        test = getattr(test, "__func__", test)
        # @settings sets this attribute and @given reads it. hypothesis has no public way to change it later.
        test_settings = getattr(test, "_hypothesis_internal_use_settings", None)
        if test_settings is not None and test not in seen:
            seen.add(test)
            test._hypothesis_internal_use_settings = settings(
                test_settings, max_examples=test_settings.max_examples * config.getoption("--examples-times")
            )


if __name__ == "__main__":
    main()
