"""Which number of slots is named for each heat and expert-parallel size, and whether it was right afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.time.cells import Cell
from eplb_service.replay.advice import Option, cheapest
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.schedule import Schedule

NEAR = 0.01
"""Part of the time by which a number of slots must be slower on the last window to have been wrong."""


@dataclass(frozen=True)
class Named:
    """The slots named, by `eplb advise`'s rule on what the next window realised, and those fastest on the one after."""

    heat: str
    tokens: int
    ranks: int
    slots: int
    fastest: int
    slower: float
    """Part of the time that the slots named take more than the fastest, on that last window."""
    wasted: int
    """Slots named beyond the fewest that are as fast there, up to ``NEAR``."""

    @property
    def right(self) -> bool:
        """As fast as the fastest, with no slot more than that takes."""
        return self.slower <= NEAR and self.wasted <= 0


def named(found: Sequence[Cell]) -> Iterator[Named]:
    """One for each heat and expert-parallel size."""
    for (heat, tokens, ranks), group in groupby(found, key=lambda cell: (cell.heat, cell.tokens, cell.ranks)):
        tried = list(group)
        choice = cheapest([_option(cell) for cell in tried]).setup.slots
        fastest = min(tried, key=lambda cell: cell.last)
        near = [cell.slots for cell in tried if cell.last <= fastest.last * (1 + NEAR)]
        chosen = next(cell for cell in tried if cell.slots == choice)
        slower = chosen.last / fastest.last - 1
        yield Named(heat, tokens, ranks, choice, fastest.slots, slower, choice - min(near))


def _option(cell: Cell) -> Option:
    setup = Setup(cell.slots, Schedule(1, 1))
    return Option("", setup, 0.0, 1.0, 0.0, 0.0, 0.0, moe_ms=cell.timed_next / 1e3)
