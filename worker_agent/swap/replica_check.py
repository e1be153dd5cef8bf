"""Compares live experts with their stored checksums and with replicas on other ranks, in turn and before a copy.

A stray write into an expert makes its rank's outputs wrong, and a later switch would copy it to other ranks with a
valid checksum. Differences are reported, and a damaged expert is not sent. They end no rank: a host may be changing
weights.

The check compares bytes, as ranks do at their rendezvous, so 0.0 and -0.0 differ. Replicas that the same code loaded
from one checkpoint have equal bytes.
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
"""Shortest time from one expert to the next."""
_REST_PER_SECOND = 100.0
"""Rest for this many times as long as reading the expert took: about a percent of one core at most."""
_ANSWER_SECONDS = 0.2
_ASK_AGAIN_SECONDS = 0.02


class ReplicaCheck:
    """Reads one local expert at a time, on the transfer thread.

    Parameters
    ----------
    layers
        The live layers.
    installed
        Returns what this rank serves, or ``None`` while its host may change weights.
    peers
        The other ranks' agents.

    Attributes
    ----------
    reading : bool
        True while live weights are read.
    """

    def __init__(
        self,
        layers: Sequence[LiveLayer],
        installed: Callable[[], RankLayout | None],
        peers: Peers,
        runtime: Runtime = REAL,
    ) -> None:
        self.reading = False
        self._layers, self._installed = layers, installed
        self._peers, self._runtime = peers, runtime
        # (expert, checksum) by (layer, slot). A checksum survives a switch of its layer if the slot keeps its expert.
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        self._wrong: dict[tuple[int, int], tuple[int, str]] = {}
        self._marks: dict[int, Mark] = {}
        self._turn = self._forgotten = 0
        self._next_at = runtime.now() + _REST_SECONDS

    @property
    def complaint(self) -> str | None:
        """First expert that has changed or differs from a replica, as a sentence; ``None`` if all are alike."""
        installed = self._installed()
        for (layer, slot), (expert, reason) in tuple(self._wrong.items()):
            if installed is None or _expert_in(installed, layer, slot) == expert:
                return reason
        return None

    def seconds_left(self) -> float:
        """Return the seconds until the next turn is due."""
        return max(0.0, self._next_at - self._runtime.now())

    def forget(self) -> None:
        """Take the experts as they are now: the host has changed them, or may have."""
        self._forgotten += 1
        self._sums, self._wrong = {}, {}

    def committed(self, layer: int) -> None:
        """Note, on the model's thread, that a layer's experts have been overwritten up to this point of its stream."""
        self._marks[layer] = Mark(self._layers[layer].expert_weights()[0][0].device)

    def known(self, layer: int, expert: int) -> int | None:
        """Return the stored checksum of this rank's replica of an expert, or ``None``."""
        installed = self._installed()
        if installed is None or not 0 <= layer < installed.placement.layers:
            return None
        slot = _slot_of(installed, layer, expert)
        return None if slot is None else self._sum_of(layer, slot, expert)

    def check_sources(self, moves: Mapping[int, Int32], seconds: float) -> None:
        """Compare each expert that a transfer copies with its stored checksum or, without one, with another replica.

        The transfer thread of every rank calls it, on its stream, before the copies begin. The rank of the other
        replica reads that replica if it has no stored checksum. If its checksum does not arrive in time, the expert is
        copied without a comparison.

        Parameters
        ----------
        moves
            Moves by layer index: source rank and slot, destination rank and slot, expert, int32
            ``[M, 5]``. None of these layers may switch during the call.
        seconds
            Longest wait for the checksums of other replicas.

        Raises
        ------
        ValueError
            If an expert that this rank is to send has changed, or differs from the other replica.
        """
        installed = self._installed()
        if installed is None:
            return
        unsure: dict[tuple[int, int], tuple[int, int]] = {}
        for layer, moves_M5 in moves.items():
            unsure |= self._read_sources(layer, moves_M5, installed)
        self._ask_witnesses(unsure, installed, seconds)
        for layer, moves_M5 in moves.items():
            for source, slot, _, _, expert in moves_M5.tolist():
                found = self._wrong.get((layer, slot)) if source == installed.rank else None
                if found is not None and found[0] == expert:
                    raise ValueError(found[1])

    def _read_sources(
        self, layer: int, moves_M5: Int32, installed: RankLayout
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """Read the experts of a layer that this rank sends, and the replicas that other ranks will ask about.

        Returns, for each layer and slot without a stored checksum, the expert and the rank of its other replica.
        """
        unsure = {}
        for source, slot, expert in sorted({(move[0], move[1], move[4]) for move in moves_M5.tolist()}):
            others = _others(installed, layer, expert, source)
            witness = others[expert % len(others)] if others else None
            held = _slot_of(installed, layer, expert)
            if held is None or installed.rank not in (source, witness):
                continue
            stored = self._sum_of(layer, held, expert)
            if installed.rank == source or stored is None:
                self._store(layer, held, self._read(layer, held), installed)
            if installed.rank == source and stored is None and witness is not None:
                unsure[layer, slot] = expert, witness
        return unsure

    def turn(self, stream: SideStream) -> None:
        """Read the next expert, compare it, and set when the one after it is due."""
        began = self._runtime.now()
        try:
            installed = self._installed()
            if installed is not None:
                slots = installed.placement.phy2log_LRS.shape[2]
                layer, slot = divmod(self._turn % (len(self._layers) * slots), slots)
                self._turn += 1
                with stream.current():
                    self._compare(layer, slot, installed)
        finally:
            took = self._runtime.now() - began
            self._next_at = began + took + max(_REST_SECONDS, _REST_PER_SECOND * took)

    def _compare(self, layer: int, slot: int, installed: RankLayout) -> None:
        epoch = installed.layer_epochs[layer]
        forgotten = self._forgotten
        self.reading = True
        try:
            # Asked only now: whoever drains from here on waits until this is read.
            if not self._unchanged(layer, epoch, forgotten):
                return
            value = self._read(layer, slot)
        finally:
            self.reading = False
        if not self._unchanged(layer, epoch, forgotten) or not self._store(layer, slot, value, installed):
            return
        expert = _expert_in(installed, layer, slot)
        others = _others(installed, layer, expert, installed.rank)
        rank = others[self._turn % len(others)] if others else None
        theirs = None if rank is None else self._elsewhere(layer, expert, rank)
        if not self._unchanged(layer, epoch, forgotten):
            return
        if theirs is not None and theirs != value:
            self._differs(layer, slot, rank, installed)
        else:
            self._wrong.pop((layer, slot), None)

    def _store(self, layer: int, slot: int, value: int, installed: RankLayout) -> bool:
        """Store the checksum of a slot's expert; return ``False`` if it differs from the stored one."""
        expert = _expert_in(installed, layer, slot)
        stored = self._sum_of(layer, slot, expert)
        if stored is not None and stored != value:
            self._wrong[layer, slot] = (
                expert,
                f"{_place(installed, layer, slot)} has changed while it was served; restart the engine, or drain "
                "before changing weights",
            )
            return False
        self._sums[layer, slot] = expert, value
        return True

    def _differs(self, layer: int, slot: int, rank: int | None, installed: RankLayout) -> None:
        reason = f"{_place(installed, layer, slot)} differs from its replica on rank {rank}"
        self._wrong[layer, slot] = _expert_in(installed, layer, slot), reason

    def _ask_witnesses(
        self, unsure: dict[tuple[int, int], tuple[int, int]], installed: RankLayout, seconds: float
    ) -> None:
        """Compare slots with other replicas until all have answered or ``seconds`` pass.

        ``unsure`` maps a layer and slot to the expert there and the rank of its other replica.
        """
        end = self._runtime.now() + seconds
        while unsure and self._runtime.now() < end:
            for (layer, slot), (expert, rank) in tuple(unsure.items()):
                theirs = self._elsewhere(layer, expert, rank)
                if theirs is None:
                    continue
                del unsure[layer, slot]
                if theirs != self._sum_of(layer, slot, expert):
                    self._differs(layer, slot, rank, installed)
            if unsure:
                self._runtime.sleep(_ASK_AGAIN_SECONDS)

    def _read(self, layer: int, slot: int) -> int:
        mark = self._marks.get(layer)
        if mark is not None:
            mark.hold_current_stream()
        return checksum([weight[slot] for weight in self._layers[layer].expert_weights()])

    def _sum_of(self, layer: int, slot: int, expert: int) -> int | None:
        """Return the stored checksum of a slot if it belongs to this expert, else ``None``."""
        found = self._sums.get((layer, slot))
        return found[1] if found is not None and found[0] == expert else None

    def _unchanged(self, layer: int, epoch: int, forgotten: int) -> bool:
        """Return whether neither a commit nor the host can have written to the layer since."""
        now = self._installed()
        return now is not None and now.layer_epochs[layer] == epoch and self._forgotten == forgotten

    def _elsewhere(self, layer: int, expert: int, rank: int) -> int | None:
        """Return the checksum of another rank's replica, or ``None`` if that rank does not reply or has none yet."""
        with suppress(PeerGoneError):
            answer = self._peers.ask([rank], b"c%d %d" % (layer, expert), _ANSWER_SECONDS).get(rank, b"-")
            if answer[:1] == b"+":
                return int(answer[1:])
        return None


def _expert_in(installed: RankLayout, layer: int, slot: int) -> int:
    return int(installed.placement.phy2log_LRS[layer, installed.rank, slot])


def _slot_of(installed: RankLayout, layer: int, expert: int) -> int | None:
    """Return this rank's first slot with an expert, or ``None`` if it has no replica of it."""
    slots = np.flatnonzero(installed.placement.phy2log_LRS[layer, installed.rank] == expert)
    return int(slots[0]) if slots.size else None


def _others(installed: RankLayout, layer: int, expert: int, rank: int) -> list[int]:
    """Return the ranks other than ``rank`` that hold an expert."""
    holders = np.flatnonzero((installed.placement.phy2log_LRS[layer] == expert).any(axis=1))
    return [holder for holder in holders.tolist() if holder != rank]


def _place(installed: RankLayout, layer: int, slot: int) -> str:
    expert = _expert_in(installed, layer, slot)
    return f"layer {layer}: expert {expert} in slot {slot} of rank {installed.rank}"
