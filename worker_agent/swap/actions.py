"""What the switch machine asks for: each action a value, carried out by the driver in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from eplb_service.wire.plan import RankLayer
from worker_agent.swap.installed import Installed


@dataclass(frozen=True)
class StartTransfer:
    """Stage this rank's incoming experts of ``layer``; answer with ``with_transfer_ended``.

    ``lane`` grows, on all ranks at once, whenever a transfer was aborted: bytes of an abandoned transfer must never
    meet those of a later one.
    """

    layer: RankLayer
    generation: int
    lane: int


@dataclass(frozen=True)
class Commit:
    """Copy what the transfer of ``generation`` has staged, and the new tables, into place, now.

    ``before`` is what was served until here.
    """

    plan_id: int
    generation: int
    layer: RankLayer
    before: Installed
    after: Installed


@dataclass(frozen=True)
class DropStaging:
    """Forget what is staged; the transfer of ``generation`` may still be running out."""

    generation: int


@dataclass(frozen=True)
class Accepted:
    """Report to the service that the plan is valid here."""

    plan_id: int
    layer: int


@dataclass(frozen=True)
class Refused:
    """Report to the service why the plan is not valid here."""

    plan_id: int
    reason: str


@dataclass(frozen=True)
class Aborted:
    """Report to the service that ``layer`` and those after it stay as they were."""

    plan_id: int
    layer: int
    reason: str


@dataclass(frozen=True)
class Diverged:
    """Serve no further token: the ranks are known to serve different placements."""

    reason: str


@dataclass(frozen=True)
class Halted:
    """Report to the service that this rank no longer takes plans, and why."""

    reason: str


Action: TypeAlias = StartTransfer | Commit | DropStaging | Accepted | Refused | Aborted | Halted | Diverged
