"""Carries experts over a lane, chunk by chunk, within a byte budget, and verifies what arrived where asked to."""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from worker_agent.device import bytes_of
from worker_agent.swap.lane.lane import Deadline, Lane, Parcel
from worker_agent.swap.transfer_schedule import Leg


class ByteBudget:
    """Filled at each step boundary, drawn from by the transfer thread.

    Parameters
    ----------
    bytes_per_step
        ``None`` sets no limit. A chunk larger than one step's share waits for several steps.
    """

    def __init__(self, bytes_per_step: int | None) -> None:
        self._bytes_per_step = bytes_per_step
        self._left = 0
        self._changed = threading.Condition()

    def refill(self) -> None:
        """A step has gone by. What was not used is not saved up."""
        if self._bytes_per_step is None:
            return
        with self._changed:
            self._left = min(self._left, 0) + self._bytes_per_step
            self._changed.notify()

    def open(self) -> None:
        """Admit whatever is asked for until the next ``refill``: the model makes no steps that could be slowed."""
        with self._changed:
            self._left = sys.maxsize
            self._changed.notify()

    def draw(self, size: int, timeout: float) -> bool:
        """Wait until the budget admits ``size`` bytes; ``False`` past ``timeout`` seconds."""
        if self._bytes_per_step is None:
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, timeout):
                return False
            self._left -= size
            return True


class Carrier:
    """Moves one layer's experts.

    Parameters
    ----------
    lane
        What they travel over.
    chunk_bytes
        Largest single message; the same on all ranks.
    budget
        Bytes that may leave, or arrive, per step.
    deadline
        Of the whole transfer.
    """

    def __init__(self, lane: Lane, chunk_bytes: int, budget: ByteBudget, deadline: Deadline) -> None:
        self._lane = lane
        self._chunk_bytes = chunk_bytes
        self._budget = budget
        self._deadline = deadline

    def carry(self, outgoing: Leg | None, incoming: Leg | None) -> None:
        """Send one expert while receiving another, tensor by tensor."""
        sent = outgoing.parts if outgoing else ()
        received = incoming.parts if incoming else ()
        for part_out, part_in in zip_longest(sent, received):
            self._exchange(
                () if outgoing is None else self._chunks(outgoing.peer, part_out),
                () if incoming is None else self._chunks(incoming.peer, part_in),
            )

    def verify(self, outgoing: Leg | None, incoming: Leg | None) -> None:
        """Compare what was sent with what is staged; raises ``ValueError`` where an expert came out different."""
        checksums = [expert_checksum(leg.parts) if leg else 0 for leg in (outgoing, incoming)]
        sums = [torch.tensor([checksum], dtype=torch.int64) for checksum in checksums]
        if (leg := outgoing or incoming) is not None:
            sums = [one.to(leg.parts[0].device) for one in sums]
        received = torch.zeros_like(sums[1])
        self._exchange(
            () if outgoing is None else self._chunks(outgoing.peer, sums[0]),
            () if incoming is None else self._chunks(incoming.peer, received),
        )
        if incoming is not None and int(received) != checksums[1]:
            raise ValueError(
                f"expert {incoming.expert} from rank {incoming.peer} has the checksum {checksums[1]:#010x}, "
                f"was sent as {int(received):#010x}"
            )

    def _chunks(self, peer: int, part: torch.Tensor) -> list[Parcel]:
        return [Parcel(peer, chunk) for chunk in bytes_of(part).split(self._chunk_bytes)]

    def _exchange(self, outgoing: Iterable[Parcel], incoming: Iterable[Parcel]) -> None:
        for sent, received in zip_longest(outgoing, incoming):
            size = max(parcel.data.nbytes for parcel in (sent, received) if parcel is not None)
            # The receiver draws as well: else it would hold its device for a sender that waits for its own steps.
            if not self._budget.draw(size, self._deadline.left()):
                raise TimeoutError("the model made no steps that the byte budget could be drawn from")
            self._lane.exchange(sent, received, self._deadline)


def expert_checksum(parts: Sequence[torch.Tensor]) -> int:
    """CRC-32 over the bytes of an expert's tensors, in their order; reads them from their device."""
    value = 0
    for part in parts:
        value = zlib.crc32(bytes_of(part).cpu().numpy().data, value)
    return value
