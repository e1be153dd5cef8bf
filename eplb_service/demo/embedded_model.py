"""The sizes of the model that comes with the agent, read from the header of its weights without torch."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

_WEIGHTS = Path("model", "weights", "byte_moe.safetensors")


def layers_and_experts() -> tuple[int, int]:
    """L and E of the embedded model. Raises ``FileNotFoundError`` where the agent's package is not there."""
    agent = importlib.util.find_spec("worker_agent")
    if agent is None or agent.origin is None:
        raise FileNotFoundError(
            "the embedded model comes with the worker_agent package, which is not installed"
        )
    with (Path(agent.origin).parent / _WEIGHTS).open("rb") as file:
        # A safetensors file begins with the length of its JSON header.
        (length,) = struct.unpack("<Q", file.read(8))
        config = json.loads(json.loads(file.read(length))["__metadata__"]["config"])
    return int(config["layers"]), int(config["experts"])
