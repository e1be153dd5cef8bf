"""What a demo rank is told to do, in a JSON file that whoever starts the ranks has written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoTask:
    """One demo run.

    Parameters
    ----------
    counts
        ``.npy`` file of the heat to serve, int ``[steps, layers, experts]``.
    service
        host:port of the service.
    rendezvous
        File by which the ranks' process groups find each other.
    ranks, slots
        R and S.
    hidden, intermediate
        H and I of each expert.
    dispatcher
        ``"all2allv"`` or ``"allgather"``.
    seed
        Draws weights, tokens and their order.
    report_every
        Steps between two progress lines.
    """

    counts: str
    service: str
    rendezvous: str
    ranks: int
    slots: int
    hidden: int
    intermediate: int
    dispatcher: str
    seed: int
    report_every: int

    @classmethod
    def read(cls, path: Path) -> DemoTask:
        """Load it from a JSON file with these keys."""
        return cls(**json.loads(path.read_text()))
