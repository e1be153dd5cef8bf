"""SplitMix64 in whole numbers, and draws made of its upper halves."""

from __future__ import annotations

_WORD = 2**64 - 1


def splitmix(state):
    """Next state and its number."""
    state = state + 0x9E3779B97F4A7C15 & _WORD
    mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return state, mixed ^ mixed >> 31


class Draws:
    """One sequence of draws."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def draw(self, below):
        self.state, number = splitmix(self.state)
        return number // 2**32 * below // 2**32
