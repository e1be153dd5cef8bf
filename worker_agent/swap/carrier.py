"""Carries legs over a lane, chunk by chunk, within a byte budget, and compares what arrived where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import torch

from worker_agent.swap.budget import ByteBudget
from worker_agent.swap.checksum import bytes_of, expert_checksum
from worker_agent.swap.lane.lane import Deadline, Lane, Parcel
from worker_agent.swap.legs import Leg


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
        told = [expert_checksum(leg.parts) if leg else 0 for leg in (outgoing, incoming)]
        sums = [torch.tensor([word], dtype=torch.int64) for word in told]
        if (leg := outgoing or incoming) is not None:
            sums = [word.to(leg.parts[0].device) for word in sums]
        heard = torch.zeros_like(sums[1])
        self._exchange(
            () if outgoing is None else self._chunks(outgoing.peer, sums[0]),
            () if incoming is None else self._chunks(incoming.peer, heard),
        )
        if incoming is not None and int(heard) != told[1]:
            raise ValueError(
                f"expert {incoming.expert} from rank {incoming.peer} has the checksum {told[1]:#010x}, "
                f"was sent as {int(heard):#010x}"
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
