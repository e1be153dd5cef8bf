"""Tests of the search behind `make explore`: it finds violated invariants and does not count unexpected errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.exploring import Event, Walk, happen, must, report, walk


@dataclass(frozen=True)
class Stairs:
    """A counter as a world. At ``trap`` it violates an invariant, and at ``stumble`` it raises an unexpected error."""

    at: int = 0
    top: int = 3
    trap: int | None = None
    stumble: int | None = None

    @property
    def settled(self) -> bool:
        return self.at == self.top

    def events(self) -> Iterator[Event]:
        if self.at < 5:
            yield ("up",)

    def needs_no_fault(self, event: Event) -> bool:
        return self.at < self.top

    def after(self, event: Event) -> Stairs:
        happen(self._step)
        return Stairs(self.at + 1, self.top, self.trap, self.stumble)

    def _step(self) -> None:
        must(self.at != self.trap, "stepped into the trap")
        if self.at == self.stumble:
            raise TypeError("one argument too many")

    def key(self) -> int:
        return self.at


def test_a_violated_invariant_is_reported_with_the_shortest_sequence_of_events() -> None:
    seen = walk("trap", Stairs(trap=2))
    assert seen.broken == "stepped into the trap\n    after up, up, up"
    assert seen.caught


def test_a_state_that_never_settles_is_found() -> None:
    seen = walk("beyond the top", Stairs())
    assert seen.broken is not None
    assert seen.broken.startswith("the pending actions can never end")


def test_an_unexpected_error_violates_an_invariant_but_does_not_count_as_caught() -> None:
    seen = walk("stumble", Stairs(stumble=1))
    assert seen.broken is not None
    assert "one argument too many" in seen.broken
    assert not seen.caught


def test_only_mutants_that_violate_invariants_are_caught() -> None:
    good = Walk("a walk", 1, 1, 0.0, None)
    trapped = walk("trap", Stairs(trap=2))
    tripped = walk("stumble", Stairs(stumble=1))
    assert report(iter([good]), iter([("Trapped", trapped)]))
    assert not report(iter([good]), iter([("Tripped", tripped)]))
    assert not report(iter([good]), iter([("Unharmed", good)]))
