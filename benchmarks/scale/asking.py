"""What the measuring process asks of those that it has started."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any


def asked_by(pipe: Connection) -> Any:
    """What the measuring process asks for; ``None`` where it is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None
