"""What the doctor finds: one line of what was looked at, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(str, enum.Enum):
    """What came of a check."""

    OK = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One check.

    Parameters
    ----------
    name
        What was looked at.
    verdict
        What came of it.
    text
        Figures, or what is wrong and what to do.
    """

    name: str
    verdict: Verdict
    text: str

    @classmethod
    def ok(cls, name: str, text: str) -> Finding:
        """As it should be."""
        return cls(name, Verdict.OK, text)

    @classmethod
    def failed(cls, name: str, text: str) -> Finding:
        """Not as it should be."""
        return cls(name, Verdict.FAILED, text)

    @classmethod
    def skipped(cls, name: str, text: str) -> Finding:
        """Not looked at, and why."""
        return cls(name, Verdict.SKIPPED, text)
