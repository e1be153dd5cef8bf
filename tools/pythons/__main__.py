"""Test the wheels on every supported Python version that is installed on this machine: ``make pythons``.

On each version, run ``--help`` for every command, solve once, encode and decode every message, and connect an agent. If
eplb-service does not support the version, only eplb-agent is tested. Missing versions are listed at the end. On the
version that runs this script, the commands of the docs pages and each extra are tested as well, in an environment that
is installed according to the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from tools.pythons.documents import check_documents, copy_of_checkout, install_from
from tools.pythons.extras import EXTRAS, check_extra
from tools.pythons.running import FailedError, clean_environment, install, run, wait_for

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SERVICE_FROM = (3, 11)
OWN = ".".join(map(str, sys.version_info[:2]))
"""Python version that runs this script. The pages' commands and the extras are tested on it."""
AT_ONCE = 2


class Environment:
    """A virtual environment with the wheels installed."""

    def __init__(self, version: str, interpreter: Path, scratch: Path, wheels: dict[str, Path]) -> None:
        self.has_service = tuple(map(int, version.split("."))) >= SERVICE_FROM
        self.folder = scratch / version
        self._scratch = scratch
        if version == OWN:
            run([str(interpreter), "-m", "venv", str(self.folder)])
            install_from(scratch / "checkout", self.folder)
            install(self.folder, str(wheels["eplb_agent"]), str(wheels["eplb_lab"]), "hypothesis")
        else:
            run([str(interpreter), "-m", "venv", "--without-pip", str(self.folder)])
            install(
                self.folder,
                f"{wheels['eplb_core']}[{'planner,wire' if self.has_service else 'wire'}]",
                str(wheels["eplb_agent"]),
                *([str(wheels["eplb_service"]), str(wheels["eplb_lab"])] if self.has_service else []),
                "hypothesis",
            )

    def program(self, name: str) -> str:
        """Return the path of an installed command."""
        return str(self.folder / "bin" / name)

    def check(self) -> list[str]:
        """Run all checks and return their names. Raises ``FailedError`` if a check fails."""
        python = self.program("python")
        checks = [run([python, str(HERE / "messages.py")], self._scratch).strip()]
        run([self.program("eplb-agent-doctor"), "--help"])
        if self.has_service:
            run([self.program("eplb"), "--help"])
            checks.append(run([python, str(HERE / "helps.py")]).strip())
            run([python, "-c", _SOLVE])
            checks.append("a solve")
        program = self.program("eplb") if self.has_service else str(Path(sys.executable).parent / "eplb")
        with serving(program, self._scratch / f"service-{self.folder.name}") as address:
            run([python, str(HERE / "connect.py"), address, "alone"])
            if self.has_service:
                listed = run([program, "deployments", "--address", address])
                if "alone" not in listed:
                    raise FailedError(f"eplb deployments does not list the deployment:\n{listed}")
        return [*checks, "an agent"]


_SOLVE = """
import numpy as np
from eplb_service import solve
heat = np.random.default_rng(0).zipf(1.5, size=(32, 2, 16)).clip(max=500)
solution = solve(heat, ranks=4, slots=5, threads=1)
assert solution.par_after < solution.par_before, solution
"""


def main() -> None:
    """Build the wheels, test each Python version and each extra, and exit with 1 if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.pythons", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=VERSIONS, help="Python versions to test, such as 3.10 (default: all)"
    )
    parser.add_argument("--pythons-alone", action="store_true", help="skip the docs pages and the extras")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="eplb-pythons-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        wheels = built_wheels(scratch)
        copy_messages(scratch)
        checkout = copy_of_checkout(scratch)
        interpreters = {
            version: path for version in options.only if (path := interpreter_of(version)) is not None
        }
        environments: dict[str, Environment] = {}

        def on(version: str) -> list[str]:
            environments[version] = Environment(version, interpreters[version], scratch, wheels)
            return environments[version].check()

        # The check of the docs pages takes longest and needs only this Python's environment, so start it first.
        order = sorted(interpreters, key=lambda version: version != OWN)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            tries = {f"Python {version}": pool.submit(on, version) for version in order[:AT_ONCE]}
            wait(list(tries.values())[:1])
            has_documents = OWN in environments and not options.pythons_alone
            if has_documents:
                documents_environment = environments[OWN].folder
                tries["commands on the docs pages"] = pool.submit(
                    check_documents, checkout, documents_environment
                )
            tries |= {f"Python {version}": pool.submit(on, version) for version in order[AT_ONCE:]}
            if has_documents:
                tries |= {
                    f"extra {extra}": pool.submit(check_extra, extra, documents_environment, scratch, wheels)
                    for extra in EXTRAS
                }
            failed = reported(tries, began)
    missing = [version for version in options.only if version not in interpreters]
    print(
        f"not found on this machine: Python {', '.join(missing)}"
        if missing
        else "every Python version was found"
    )
    print(f"{time.monotonic() - began:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def reported(tries: dict[str, Future[list[str]]], began: float) -> list[str]:
    """Print each result as it completes, with the elapsed seconds. Return the names of failed checks."""
    names = {future: name for name, future in tries.items()}
    failed = []
    for future in as_completed(names):
        name = names[future]
        after = f"{time.monotonic() - began:.0f} s"
        try:
            print(f"ok      {name}: {', '.join(future.result())} ({after})", flush=True)
        except FailedError as failure:
            print(f"FAILED  {name}: {failure} ({after})", flush=True)
            failed.append(name)
    return failed


def built_wheels(folder: Path) -> dict[str, Path]:
    """Build the wheels and return their paths by distribution."""
    run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)),
            *(str(ROOT / "packaging" / name) for name in ("eplb-core", "eplb-agent", "eplb-lab")),
            str(ROOT),
        ]
    )
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def copy_messages(folder: Path) -> None:
    """Copy the tests' messages into ``folder``, so that they import the installed packages, not the checkout's."""
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/__init__.py", folder / "tests")
    shutil.copytree(ROOT / "tests/wire", folder / "tests/wire", ignore=shutil.ignore_patterns("__pycache__"))


def interpreter_of(version: str) -> Path | None:
    """Return an interpreter for a version: the one that runs this script, one on the path, or one from pyenv."""
    executable = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [Path(sys.executable), *([Path(executable)] if executable else [])]
    candidates += [folder / "bin/python" for folder in sorted(pyenv.glob(f"{version}.*"))]
    for path in candidates:
        question = [str(path), "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        with contextlib.suppress(OSError):
            answer = subprocess.run(question, capture_output=True, text=True, check=False)
            if answer.stdout.strip() == version:
                return path
    return None


@contextlib.contextmanager
def serving(program: str, folder: Path) -> Iterator[str]:
    """Run ``eplb serve`` in a separate directory, and yield its address once it accepts connections."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [program, "serve", "--listen", address, "--insecure", "--metrics", "127.0.0.1:0"]
    command += ["--store", str(folder / "state.sqlite3")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=clean_environment())
    try:
        wait_for(address, process, folder / "log")
        yield address
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
