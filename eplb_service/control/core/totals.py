"""What a deployment has been through, in numbers that fit wherever they are stored or sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

_MOST_TOTAL = 1 << 62
"""Bound on a total: what is stored and sent stays within 64 bits, whatever the ranks report."""


@dataclass(frozen=True)
class Totals:
    """What a deployment has been through, over all its groups; no sum grows past ``_MOST_TOTAL``."""

    layers_switched: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    steps_received: int = 0
    steps_lost: int = 0

    def plus(self, **gains: int) -> Totals:
        """These and ``gains``, by field."""
        return replace(
            self, **{name: min(getattr(self, name) + gain, _MOST_TOTAL) for name, gain in gains.items()}
        )
