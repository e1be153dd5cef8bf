"""Whose turn it is to send: in the order of asking, and only as much at a time as there is room for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Turns(Generic[Who]):
    """Gives room to those who ask for it; knows no clock and no tasks.

    Parameters
    ----------
    most_bytes
        That may be under way at a time. What is larger goes alone.

    ``held`` is what is under way.
    """

    def __init__(self, most_bytes: int) -> None:
        self.held = 0
        self._most_bytes = most_bytes
        self._waiting: dict[Who, int] = {}
        self._sending: dict[Who, int] = {}

    def ask(self, who: Who, size: int) -> list[Who]:
        """``who`` would send ``size`` bytes; returns those whose turn it is now."""
        self._waiting[who] = size
        return self._next()

    def over(self, who: Who) -> list[Who]:
        """``who`` has sent, or will not; returns those whose turn it is now. Nothing happens where it is so already."""
        self._waiting.pop(who, None)
        self.held -= self._sending.pop(who, 0)
        return self._next()

    def _next(self) -> list[Who]:
        begun: list[Who] = []
        for who, size in self._waiting.items():
            if self._sending and self.held + size > self._most_bytes:
                break
            self._sending[who] = size
            self.held += size
            begun.append(who)
        for who in begun:
            del self._waiting[who]
        return begun
