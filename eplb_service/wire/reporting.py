"""How much of its heat an agent reports; what the service asks for, and may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.wire.fields import check_count
from eplb_service.wire.generated import agent_pb2

MOST_BLOCKS = 8
"""Bound on ``one_in``: blocks further apart would hardly be of one window."""
MOST_REPORT_STEPS = 1 << 16
"""Steps that a service may ask for in one report."""


@dataclass(frozen=True)
class Reporting:
    """What an agent sends of what it counts. A block is as many steps as a report has, counted from step 0.

    Parameters
    ----------
    source_sums
        Whether own tokens are summed over each report, where slots are counted too; otherwise they go step by step.
    one_in
        Of so many blocks one is reported, the same one by all ranks; 1 where all are.
    report_steps
        Steps per report; 0 for as many as the Welcome says.
    """

    source_sums: bool = False
    one_in: int = 1
    report_steps: int = 0

    def wants(self, block: int) -> bool:
        """Whether the block of this number is reported."""
        return block % self.one_in == 0


EVERYTHING = Reporting()
"""Every step in full: what agents do where no service asks for less."""


def encode_reporting(reporting: Reporting) -> agent_pb2.Reporting:
    """The message."""
    return agent_pb2.Reporting(
        source_sums=reporting.source_sums, one_in=reporting.one_in, report_steps=reporting.report_steps
    )


def decode_reporting(message: agent_pb2.Reporting) -> Reporting:
    """The Reporting; raises ``WireError`` where it asks for next to nothing, or for reports without an end."""
    return Reporting(
        message.source_sums,
        check_count(message.one_in or 1, "reporting.one_in", MOST_BLOCKS + 1, least=1),
        check_count(message.report_steps, "reporting.report_steps", MOST_REPORT_STEPS + 1),
    )
