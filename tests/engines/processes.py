"""Start and stop an engine's processes. The workers are stopped even if their parent is gone."""

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
    """Run ``command`` in a new session. The output of the process and its workers goes to ``log``."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def end_engine(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process, and kill the rest of its session after a minute.

    Do nothing if the whole session has already exited.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
