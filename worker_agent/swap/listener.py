"""What the switch reports, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worker_agent.swap.installed import Installed


@dataclass
class SwitchStats:
    """What this rank has switched since its start."""

    layers_switched: int = 0
    experts_received: int = 0
    bytes_received: int = 0
    plans_aborted: int = 0
    commit_seconds: float = 0.0
    transfer_seconds: float = 0.0

    def count(self, done: Committed, experts_received: int) -> None:
        """One more layer has been switched in, for which this rank received so many experts."""
        self.layers_switched += 1
        self.experts_received += experts_received
        self.bytes_received += done.bytes_received
        self.commit_seconds += done.commit_seconds
        self.transfer_seconds += done.transfer_seconds


@dataclass(frozen=True)
class Committed:
    """One layer has been switched in."""

    plan_id: int
    layer: int
    installed: Installed
    bytes_received: int
    transfer_seconds: float
    commit_seconds: float


class Listener(Protocol):
    """Whoever wants to know what became of plans; nothing that it does can stop a switch."""

    def before_commit(self, layer_epochs: tuple[int, ...]) -> None:
        """A layer is about to switch; what was counted until here was counted under ``layer_epochs``."""

    def accepted(self, plan_id: int, layer: int) -> None:
        """The plan is valid here."""

    def refused(self, plan_id: int, reason: str) -> None:
        """The plan is not valid here; nothing changed."""

    def transferred(self, plan_id: int, layer: int, bytes_received: int, seconds: float) -> None:
        """All bytes of the layer are staged here."""

    def committed(self, done: Committed) -> None:
        """The layer is in place."""

    def aborted(self, plan_id: int, layer: int, reason: str) -> None:
        """The layer and those after it stay as they were."""
