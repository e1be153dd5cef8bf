"""What a transfer asks of a lane: one parcel out and one in at a time, done or failed by a deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Parcel:
    """Bytes on their way to or from ``peer``: uint8 ``[n]``, a view of live or staged memory."""

    peer: int
    data: torch.Tensor


class Deadline:
    """The moment by which something must be done, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; raises ``TimeoutError`` where none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done within {self._seconds:g} s")
        return left


class Lane(Protocol):
    """A process group that carries transfers and nothing else."""

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        """Send one parcel while receiving another, of other peers or the same.

        When it returns the bytes have left and arrived, on the device as well, in the order of the current stream.
        Raises ``TimeoutError`` past the deadline, ``RuntimeError`` on a broken link.
        """

    def retire(self) -> None:
        """Carry nothing more. The other ranks' exchanges with this one fail as soon as they see it."""
