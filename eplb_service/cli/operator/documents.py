"""What commands that ask a running service print with ``--json``, where it is not the service's answer as it came."""

from __future__ import annotations

from eplb_service.cli.output.document import Document


class PlacementDocument(Document):
    """The placement in force."""

    epoch: int
    phy2log: list[list[list[int]]]
    """Expert in each slot, ``[layers, ranks, slots]``."""
    log2phy: list[list[list[int | list[int]]]]
    """Physical id that a source rank's tokens of an expert go to, ``[ranks, layers, experts]``; several in turn."""


class PausedDocument(Document):
    """Whether planning is paused."""

    deployment: str
    paused: bool


class LeadDocument(Document):
    """Whom the ranks follow."""

    deployment: str
    leader_term: int
    raised: bool


class ForgottenDocument(Document):
    """A deployment that was removed."""

    deployment: str
    forgotten: bool
