"""Functions that run programs outside the checkout, without the settings in this process's environment."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

SECONDS = 1800.0
"""Timeout for a program, in seconds. It is long, so that a slow run on a busy machine does not count as a failure."""


class FailedError(Exception):
    """Raised if a program fails. The message contains the end of its output."""


def clean_environment() -> dict[str, str]:
    """Return the environment without variables that affect the packages' settings or imports.

    ``PIP_COMPILE=0`` keeps pip from compiling all modules, because Python compiles the few that are imported.
    """
    changing = ("EPLB_", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "XDG_STATE_HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    return kept | {"PIP_COMPILE": "0"}


def install(environment: Path, *packages: str) -> None:
    """Install packages into a virtual environment, which does not need its own pip."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    run([*pip, "install", "--quiet", *packages])


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
        Directory that Python searches before the installed packages.
    cwd
        Working directory; by default an empty directory, so that the checkout's packages cannot be imported.
    environment
        Environment variables; by default those of ``clean_environment``.

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
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"{' '.join(command)[:300]} did not finish within {SECONDS:g} s") from error
    if done.returncode or "Traceback" in done.stderr:
        output = (done.stderr or done.stdout).strip()[-1500:]
        raise FailedError(f"{' '.join(command)[:300]} exited with code {done.returncode}:\n{output}")
    return done.stdout


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the process accepts connections at an address.

    Raises ``FailedError`` with the end of the log if the process exits first or the wait times out.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.1)
    raise FailedError(f"no server accepts connections at {address}:\n{log.read_text()[-2000:]}")
