"""Compares live experts in turn: with what they were, and with their replicas on other ranks.

A stray write into an expert makes its rank's outputs wrong, and a later switch would copy it to other ranks with a
valid checksum. Differences are reported, and a damaged expert is not sent. They end no rank: a host may be changing
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from worker_agent.device import Mark, SideStream
from worker_agent.live_layer import LiveLayer
from worker_agent.runtime import REAL, Runtime
from worker_agent.swap.checksum import checksum
from worker_agent.swap.installed import Installed
from worker_agent.swap.peers import PeerGoneError, Peers

_REST_SECONDS = 1.0
"""Shortest time from one expert to the next."""
_REST_PER_SECOND = 100.0
"""Rest for this many times as long as reading the expert took: about a percent of one core at most."""
_ANSWER_SECONDS = 0.2


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
        installed: Callable[[], Installed | None],
        peers: Peers,
        runtime: Runtime = REAL,
    ) -> None:
        self.reading = False
        self._layers, self._installed = layers, installed
        self._peers, self._runtime = peers, runtime
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        self._wrong: dict[tuple[int, int], str] = {}
        self._marks: dict[int, Mark] = {}
        self._turn = self._forgotten = 0
        self._next_at = runtime.now() + _REST_SECONDS

    @property
    def complaint(self) -> str | None:
        """First expert that has changed or differs from a replica, as a sentence; ``None`` if all are alike."""
        return next(iter(tuple(self._wrong.values())), None)

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

    def check_source(self, layer: int, slot: int) -> None:
        """Raise ``ValueError`` if the expert of a slot is known to be damaged: it must not be copied to other ranks."""
        wrong = self._wrong.get((layer, slot))
        if wrong is not None:
            raise ValueError(wrong)

    def known(self, layer: int, expert: int, epoch: int) -> int | None:
        """Return the checksum of this rank's replica of an expert at an epoch of its layer, if it is known."""
        installed = self._installed()
        if installed is None or not 0 <= layer < installed.placement.layers:
            return None
        slots = np.flatnonzero(installed.placement.phy2log_LRS[layer, installed.rank] == expert)
        found = self._sums.get((layer, int(slots[0]))) if slots.size else None
        return found[1] if found is not None and found[0] == epoch else None

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

    def _compare(self, layer: int, slot: int, installed: Installed) -> None:
        epoch, forgotten = installed.layer_epochs[layer], self._forgotten
        self.reading = True
        try:
            # Asked only now: whoever drains from here on waits until this is read.
            value = self._read(layer, slot) if self._unchanged(layer, epoch, forgotten) else 0
        finally:
            self.reading = False
        if not self._unchanged(layer, epoch, forgotten):
            return
        place, expert = (layer, slot), int(installed.placement.phy2log_LRS[layer, installed.rank, slot])
        before = self._sums.get(place)
        where = f"layer {layer}: expert {expert} in slot {slot} of rank {installed.rank}"
        if before is not None and before[0] == epoch and before[1] != value:
            self._wrong[place] = (
                f"{where} has changed while it was served; restart the engine, or drain before weights are changed"
            )
            return
        self._sums[place] = epoch, value
        theirs = self._elsewhere(layer, expert, epoch, installed)
        if not self._unchanged(layer, epoch, forgotten):
            return
        if theirs is not None and theirs[1] != value:
            self._wrong[place] = f"{where} differs from its replica on rank {theirs[0]}"
        else:
            self._wrong.pop(place, None)

    def _read(self, layer: int, slot: int) -> int:
        mark = self._marks.get(layer)
        if mark is not None:
            mark.hold_current_stream()
        return checksum([weight[slot] for weight in self._layers[layer].expert_weights()])

    def _unchanged(self, layer: int, epoch: int, forgotten: int) -> bool:
        """Return whether neither a commit nor the host can have written to the layer since."""
        now = self._installed()
        return now is not None and now.layer_epochs[layer] == epoch and self._forgotten == forgotten

    def _elsewhere(self, layer: int, expert: int, epoch: int, installed: Installed) -> tuple[int, int] | None:
        """Return another rank that holds the expert, in turn, and its checksum; ``None`` if none knows it yet."""
        holders = np.flatnonzero((installed.placement.phy2log_LRS[layer] == expert).any(axis=1))
        others = [rank for rank in holders.tolist() if rank != installed.rank]
        if not others:
            return None
        rank = others[self._turn % len(others)]
        with suppress(PeerGoneError):
            question = b"c%d %d %d" % (layer, expert, epoch)
            answer = self._peers.ask([rank], question, _ANSWER_SECONDS).get(rank, b"-")
            if answer[:1] == b"+":
                return rank, int(answer[1:])
        return None
