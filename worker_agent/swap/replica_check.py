"""Checks live experts against their stored checksums and against their replicas on other ranks.

A stray write to an expert makes its rank's outputs wrong, and a later transfer would copy the damage to other ranks
with a valid checksum. The check reads one expert after another in the background. It also reads every expert just
before the expert is sent. Differences are reported, and a damaged expert is not sent. The check never stops a rank,
because the host may be changing weights.

Like the rendezvous, the check compares bytes, so 0.0 and -0.0 differ. Replicas that the same code has loaded from the
same checkpoint have equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from eplb_core.placement import Int32
from worker_agent.device import Mark, SideStream
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.checksum import checksum
from worker_agent.swap.peers import PeerGoneError, Peers
from worker_agent.swap.rank_layout import RankLayout

_REST_SECONDS = 1.0
"""Minimum pause between the reads of two experts."""
_REST_PER_SECOND = 100.0
"""Pause after reading an expert, as a multiple of the read time. It limits the check to about one percent of a core."""
_ANSWER_SECONDS = 0.2
_ASK_AGAIN_SECONDS = 0.02


class ReplicaCheck:
    """Checker for this rank's live experts. It checks one at a time, on the transfer thread.

    Parameters
    ----------
    layers
        The live layers.
    current_layout
        Callable that returns this rank's layout, or ``None`` while the host or a commit may be writing to weights.
    peers
        The other ranks' agents.
    runtime
        Clock.

    Attributes
    ----------
    reading : bool
        True while live weights are being read.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        current_layout: Callable[[], RankLayout | None],
        peers: Peers,
        runtime: Runtime = REAL,
    ) -> None:
        self.reading = False
        self._layers = layers
        self._current_layout = current_layout
        self._peers = peers
        self._runtime = runtime
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        """Expert and checksum, keyed by layer and slot. An entry outlives a commit if its slot keeps the expert."""
        self._complaints: dict[tuple[int, int], tuple[int, str]] = {}
        """Expert and message, keyed by layer and slot."""
        self._commit_marks: dict[int, Mark] = {}
        self._turn = 0
        self._resets = 0
        """Number of calls to ``forget``."""
        self._next_at = runtime.now() + _REST_SECONDS

    @property
    def complaint(self) -> str | None:
        """Message about the first expert that has changed or that differs from a replica, or ``None``."""
        layout = self._current_layout()
        for (layer, slot), (expert, message) in tuple(self._complaints.items()):
            if layout is None or _expert_in(layout, layer, slot) == expert:
                return message
        return None

    def seconds_left(self) -> float:
        """Return the number of seconds until the next turn is due."""
        return max(0.0, self._next_at - self._runtime.now())

    def forget(self) -> None:
        """Discard all checksums and complaints, because the host may have changed weights."""
        self._resets += 1
        self._sums = {}
        self._complaints = {}

    def committed(self, layer: int) -> None:
        """Mark the current point on the model's stream, at which a commit to a layer is complete.

        The model's thread calls this. Later reads of the layer wait for this point.
        """
        self._commit_marks[layer] = Mark(self._layers[layer].expert_weights()[0][0].device)

    def known(self, layer: int, expert: int) -> int | None:
        """Return the stored checksum of this rank's replica of an expert, or ``None`` if there is none."""
        layout = self._current_layout()
        if layout is None or not 0 <= layer < layout.placement.layers:
            return None
        slot = _slot_of(layout, layer, expert)
        return None if slot is None else self._stored_sum(layer, slot, expert)

    def check_sources(self, moves: Mapping[int, Int32], seconds: float) -> None:
        """Check the experts of a transfer before they are sent.

        Each expert is compared with its stored checksum or, if there is none, with a replica on another rank.

        Every rank's transfer thread calls this on its own stream before sending anything. The rank with the other
        replica, the witness, reads that replica if it has no stored checksum for it. If the witness does not answer in
        time, the expert is sent without a comparison.

        Parameters
        ----------
        moves
            Moves keyed by layer index: source rank and slot, destination rank and slot, expert, int32 ``[M, 5]``. None
            of these layers may switch during the call.
        seconds
            Maximum time to wait for the witnesses.

        Raises
        ------
        ValueError
            If an expert that this rank is about to send has changed or differs from the witness's replica.
        """
        layout = self._current_layout()
        if layout is None:
            return
        pending: dict[tuple[int, int], tuple[int, int]] = {}
        for layer, moves_M5 in moves.items():
            pending |= self._read_sources(layer, moves_M5, layout)
        self._compare_with_witnesses(pending, layout, seconds)
        for layer, moves_M5 in moves.items():
            for source, slot, _, _, expert in moves_M5.tolist():
                complaint = self._complaints.get((layer, slot)) if source == layout.rank else None
                if complaint is not None and complaint[0] == expert:
                    raise ValueError(complaint[1])

    def _read_sources(
        self, layer: int, moves_M5: Int32, layout: RankLayout
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """Read the experts of a layer for which this rank is the source or the witness.

        Returns
        -------
        dict
            Expert and witness rank, keyed by layer and slot, for each expert to be sent that had no stored checksum.
        """
        pending = {}
        for source, slot, expert in sorted({(move[0], move[1], move[4]) for move in moves_M5.tolist()}):
            holders = _other_holders(layout, layer, expert, source)
            witness = holders[expert % len(holders)] if holders else None
            local_slot = _slot_of(layout, layer, expert)
            if local_slot is None or layout.rank not in (source, witness):
                continue
            stored = self._stored_sum(layer, local_slot, expert)
            if layout.rank == source or stored is None:
                self._store(layer, local_slot, self._read(layer, local_slot), layout)
            if layout.rank == source and stored is None and witness is not None:
                pending[layer, slot] = expert, witness
        return pending

    def turn(self, stream: SideStream) -> None:
        """Check the next expert, and schedule the following turn.

        Parameters
        ----------
        stream
            Side stream for the read.
        """
        began = self._runtime.now()
        try:
            layout = self._current_layout()
            if layout is not None:
                slots = layout.placement.phy2log_LRS.shape[2]
                layer, slot = divmod(self._turn % (len(self._layers) * slots), slots)
                self._turn += 1
                with stream.current():
                    self._check(layer, slot, layout)
        finally:
            duration = self._runtime.now() - began
            self._next_at = began + duration + max(_REST_SECONDS, _REST_PER_SECOND * duration)

    def _check(self, layer: int, slot: int, layout: RankLayout) -> None:
        """Compare a slot's expert with its stored checksum and with one of its replicas on another rank.

        The result is discarded if the layer may have been written to in the meantime.
        """
        epoch = layout.layer_epochs[layer]
        resets = self._resets
        self.reading = True
        try:
            # Test this only after setting the flag, so that any drain that starts later waits for the read.
            if not self._is_unwritten(layer, epoch, resets):
                return
            value = self._read(layer, slot)
        finally:
            self.reading = False
        if not self._is_unwritten(layer, epoch, resets) or not self._store(layer, slot, value, layout):
            return
        expert = _expert_in(layout, layer, slot)
        holders = _other_holders(layout, layer, expert, layout.rank)
        rank = holders[self._turn % len(holders)] if holders else None
        remote = None if rank is None else self._ask_for_sum(layer, expert, rank)
        if not self._is_unwritten(layer, epoch, resets):
            return
        if remote is not None and remote != value:
            self._report_difference(layer, slot, rank, layout)
        else:
            self._complaints.pop((layer, slot), None)

    def _store(self, layer: int, slot: int, value: int, layout: RankLayout) -> bool:
        """Store a slot's checksum. If it differs from the stored one, record a complaint and return False."""
        expert = _expert_in(layout, layer, slot)
        stored = self._stored_sum(layer, slot, expert)
        if stored is not None and stored != value:
            self._complaints[layer, slot] = (
                expert,
                f"{_describe(layout, layer, slot)} changed while it was in use; restart the engine, or drain "
                "before changing weights",
            )
            return False
        self._sums[layer, slot] = expert, value
        return True

    def _report_difference(self, layer: int, slot: int, rank: int | None, layout: RankLayout) -> None:
        message = f"{_describe(layout, layer, slot)} differs from its replica on rank {rank}"
        self._complaints[layer, slot] = _expert_in(layout, layer, slot), message

    def _compare_with_witnesses(
        self, pending: dict[tuple[int, int], tuple[int, int]], layout: RankLayout, seconds: float
    ) -> None:
        """Compare slots with their witnesses until all have answered or ``seconds`` have passed.

        Parameters
        ----------
        pending
            Expert and witness rank, keyed by layer and slot. Entries are removed once they have been compared.
        layout
            This rank's layout.
        seconds
            Time limit.
        """
        end = self._runtime.now() + seconds
        while pending and self._runtime.now() < end:
            for (layer, slot), (expert, rank) in tuple(pending.items()):
                remote = self._ask_for_sum(layer, expert, rank)
                if remote is None:
                    continue
                del pending[layer, slot]
                if remote != self._stored_sum(layer, slot, expert):
                    self._report_difference(layer, slot, rank, layout)
            if pending:
                self._runtime.sleep(_ASK_AGAIN_SECONDS)

    def _read(self, layer: int, slot: int) -> int:
        """Return the checksum of a slot's live expert, read after the layer's last commit."""
        mark = self._commit_marks.get(layer)
        if mark is not None:
            mark.hold_current_stream()
        return checksum([weight[slot] for weight in self._layers[layer].expert_weights()])

    def _stored_sum(self, layer: int, slot: int, expert: int) -> int | None:
        """Return the stored checksum of a slot if it belongs to ``expert``, else ``None``."""
        entry = self._sums.get((layer, slot))
        return entry[1] if entry is not None and entry[0] == expert else None

    def _is_unwritten(self, layer: int, epoch: int, resets: int) -> bool:
        """Return True if neither a commit nor the host can have written to a layer.

        Parameters
        ----------
        layer
            Index of the layer.
        epoch
            The layer's epoch before the read.
        resets
            The number of resets before the read.
        """
        layout = self._current_layout()
        return layout is not None and layout.layer_epochs[layer] == epoch and self._resets == resets

    def _ask_for_sum(self, layer: int, expert: int, rank: int) -> int | None:
        """Return the checksum of another rank's replica, or ``None`` if it has none yet or does not answer."""
        with suppress(PeerGoneError):
            answer = self._peers.ask([rank], b"c%d %d" % (layer, expert), _ANSWER_SECONDS).get(rank, b"-")
            if answer[:1] == b"+":
                return int(answer[1:])
        return None


def _expert_in(layout: RankLayout, layer: int, slot: int) -> int:
    return int(layout.placement.phy2log_LRS[layer, layout.rank, slot])


def _slot_of(layout: RankLayout, layer: int, expert: int) -> int | None:
    """Return this rank's first slot that holds an expert, or ``None`` if it holds no replica."""
    slots = np.flatnonzero(layout.placement.phy2log_LRS[layer, layout.rank] == expert)
    return int(slots[0]) if slots.size else None


def _other_holders(layout: RankLayout, layer: int, expert: int, rank: int) -> list[int]:
    """Return the ranks other than ``rank`` that hold an expert."""
    holders = np.flatnonzero((layout.placement.phy2log_LRS[layer] == expert).any(axis=1))
    return [holder for holder in holders.tolist() if holder != rank]


def _describe(layout: RankLayout, layer: int, slot: int) -> str:
    expert = _expert_in(layout, layer, slot)
    return f"layer {layer}: expert {expert} in slot {slot} of rank {layout.rank}"
