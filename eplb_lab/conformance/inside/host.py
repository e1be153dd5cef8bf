"""Loop of a process that hosts an engine: calls arrive as JSON lines on one pipe, and replies are sent on another."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Host(Protocol):
    """Interface of a hosted engine: the calls that the kit makes."""

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[Any]]:
        """Return ``[ids, logprobs]`` for every prompt."""

    def sleep_and_wake(self) -> None:
        """Offload the weights, then restore them."""

    def reload(self) -> None:
        """Load the weights from the checkpoint again."""

    def close(self) -> None:
        """Stop the engine."""


def serve(start: Callable[[Mapping[str, Any]], Host]) -> None:
    """Start an engine with the options in the first line, then serve calls until ``close``.

    The pipes' file descriptors are the first two arguments of the command line.
    """
    with os.fdopen(int(sys.argv[1])) as calls, os.fdopen(int(sys.argv[2]), "w") as replies:

        def reply(value: Any) -> None:
            replies.write(json.dumps(value) + "\n")
            replies.flush()

        try:
            host = start(json.loads(calls.readline()))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
            raise
        reply({"result": None})
        for line in calls:
            call = json.loads(line)
            try:
                reply({"result": getattr(host, call["method"])(**call["arguments"])})
            except Exception as error:
                reply({"error": f"{type(error).__name__}: {error}"})
            if call["method"] == "close":
                break
