"""Interface between the kit and an engine under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Placement: TypeAlias = npt.NDArray[np.int64]
"""Logical expert in each slot of each layer, ``[L, P]``. The slots of rank 0 come first."""


class EngineError(Exception):
    """Raised if the engine fails or cannot run a scenario. The message gives the reason."""


@dataclass(frozen=True)
class Answer:
    """Generated token ids of one request, and their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Setup:
    """Options with which a scenario starts an engine.

    Parameters
    ----------
    quantised
        Quantise the experts.
    sleeps
        Enable sleep mode.
    control
        Deliberate fault in moves that the kit must detect, or None. ``weight`` leaves the first weight tensor of one
        slot behind, ``last-weight`` the last one, and ``table`` leaves one layer's routing table behind.
    """

    quantised: bool = False
    sleeps: bool = False
    control: str | None = None


class Engine(Protocol):
    """A running engine whose EPLB adopts the placements that the kit orders."""

    def placement(self) -> Placement:
        """Return the placement that the engine uses now."""

    def order(self, placement: Placement) -> None:
        """Queue a placement. The engine's EPLB adopts one at each of its next rearrangements."""

    def adopted(self) -> int:
        """Return the number of ordered placements that the engine has adopted since it started."""

    def settle(self) -> None:
        """Serve other requests until the engine has adopted all ordered placements."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        """Answer all prompts concurrently, with greedy sampling and without a prefix cache."""

    def sleep_and_wake(self) -> None:
        """Offload the weights, then restore them."""

    def reload(self) -> None:
        """Load the weights from the checkpoint again."""

    def close(self) -> None:
        """Stop the engine."""


Start: TypeAlias = Callable[[Setup], Engine]
"""Function that starts an engine. Raises ``EngineError`` if the engine does not start."""
