"""Starts and ends an engine's processes: its workers are ended with it, whatever became of their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_STOP_SECONDS = 60.0


def start_engine(
    command: Sequence[str | Path], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Run ``command`` in a session of its own; what it and its workers print goes to ``log``."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def end_engine(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and end what is left of its session after a minute; nothing where it has ended whole."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
