"""Programs that are run outside the checkout, without this environment's settings."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_SECONDS = 900.0


class FailedError(Exception):
    """A program that failed, with the end of its output."""


def clean_environment() -> dict[str, str]:
    """Return the environment without what would change the packages' settings or imports."""
    changing = ("EPLB_", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(changing)}


def run(
    command: list[str],
    path: Path | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program and return its output.

    Parameters
    ----------
    command
        Program and arguments.
    path
        Folder that Python searches before the installed packages.
    cwd
        Where to run; by default in an empty folder, so that the checkout's packages are out of reach.
    environment
        Its variables; by default ``clean_environment``.

    Returns
    -------
    str
        Standard output.

    Raises
    ------
    FailedError
        If the program fails or prints a traceback.
    """
    variables = dict(environment or clean_environment()) | ({"PYTHONPATH": str(path)} if path else {})
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                command,
                cwd=cwd or elsewhere,
                env=variables,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"{' '.join(command)[:300]} has not ended within {_SECONDS:g} s") from error
    if done.returncode or "Traceback" in done.stderr:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise FailedError(f"{' '.join(command)[:300]} ended with {done.returncode}:\n{said}")
    return done.stdout


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until somebody listens at an address; raises ``FailedError`` with the log if the process ends before."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.1)
    raise FailedError(f"nobody answers at {address}:\n{log.read_text()[-2000:]}")
