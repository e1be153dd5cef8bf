"""Runs what was built as a container would: entry point and command, the health check, and the signal that stops it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tools.image_steps.dockerfile import DockerfileError, Stage
from tools.image_steps.root import Root, StepError

_HEALTHY_SECONDS = 300.0
_STOP_SECONDS = 60.0


class Container:
    """The last stage of an image and its root.

    Parameters
    ----------
    root, stage
        Those.
    environment
        What whoever starts it adds to its own.
    """

    def __init__(self, root: Root, stage: Stage, environment: dict[str, str]) -> None:
        self._root = root
        self._environment = {**root.environment, **environment}
        self._entrypoint = _words(stage, "ENTRYPOINT")
        self._command = _words(stage, "CMD")
        check = _words(stage, "HEALTHCHECK", after="CMD")
        self._health = root.command(check)
        stop = stage.last("STOPSIGNAL")
        self._stop = signal.Signals[stop.rest] if stop is not None else signal.SIGTERM

    def says(self, *arguments: str) -> str:
        """What the entry point prints with ``arguments`` for its command; raises ``StepError`` where it fails."""
        return self._root.run([*self._entrypoint, *arguments], self._environment)

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        """Entry point and command in a network of their own, for as long as the context lasts."""
        inside = self._root.command([*self._entrypoint, *self._command])
        begin = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inside]
        with subprocess.Popen(begin, env=self._environment) as process:
            try:
                yield process
            finally:
                process.kill()

    def wait_until_healthy(self, process: subprocess.Popen[bytes]) -> int:
        """Ask the health check until it is content; returns how often. Raises ``StepError`` where it never is."""
        network = ["nsenter", f"--net=/proc/{process.pid}/ns/net"]
        asked, said, until = 0, "", time.monotonic() + _HEALTHY_SECONDS
        while time.monotonic() < until:
            if process.poll() is not None:
                raise StepError(f"it ended with exit status {process.returncode}")
            asked += 1
            check = [*network, *self._health]
            done = subprocess.run(check, env=self._environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return asked
            said = done.stderr.strip()
            time.sleep(1.0)
        raise StepError(f"the health check was not content within {_HEALTHY_SECONDS:g} s: {said}")

    def stop(self, process: subprocess.Popen[bytes]) -> float:
        """Send the signal that stops it; returns the seconds until it has ended. Raises ``StepError`` if not well."""
        began = time.monotonic()
        process.send_signal(self._stop)
        try:
            status = process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise StepError(f"it had not ended {_STOP_SECONDS:g} s after {self._stop.name}") from error
        if status:
            raise StepError(f"it ended with exit status {status} on {self._stop.name}")
        return time.monotonic() - began


def _words(stage: Stage, word: str, after: str = "") -> list[str]:
    found = stage.last(word)
    if found is None:
        raise DockerfileError(f"the last stage has no {word}")
    words: list[str] = json.loads(found.rest.removeprefix(after).strip())
    return words
