"""Scenarios: how experts move while an engine serves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from eplb_lab.conformance.engine import Answer, Engine, EngineError, Placement, Setup
from eplb_lab.conformance.placements import random_placements, rotated, swap_rounds, swapped

_RANDOM = 4


@dataclass(frozen=True)
class Load:
    """Requests in each round, and limits.

    Parameters
    ----------
    vocabulary
        Number of token ids.
    requests
        Number of concurrent requests.
    tokens
        Number of generated tokens per request.
    moves
        Maximum number of placements that a scenario orders.
    seed
        Seed for prompts and random placements.
    """

    vocabulary: int
    requests: int = 8
    tokens: int = 32
    moves: int = 16
    seed: int = 0

    def prompts(self, turn: int) -> list[list[int]]:
        """Return the prompts of a round. Each prompt draws its tokens from a different part of the vocabulary."""
        draw = random.Random(f"{self.seed}-{turn}")  # noqa: S311 - prompts are no secrets
        part = max(1, self.vocabulary // 8)
        prompts = []
        for number in range(self.requests):
            lowest = number % 8 * part
            ids = range(min(max(lowest, 3), self.vocabulary - 1), min(lowest + part, self.vocabulary))
            prompts.append(draw.choices(ids or [0], k=draw.randrange(4, 40)))
        return prompts


class Session:
    """Plays one scenario on an engine, with its moves or, for the expected answers, without them.

    Parameters
    ----------
    engine
        Engine that serves.
    load
        Requests of each round.
    moving
        False to skip the moves.
    """

    def __init__(self, engine: Engine, load: Load, moving: bool) -> None:
        self.engine = engine
        self.load = load
        self.answers: list[Answer] = []
        self.experts = 0
        """Number of slots that received a different expert."""
        self.moves = 0
        """Number of placements that the engine adopted."""
        self._moving = moving
        self._rounds = itertools.count()

    def serve(self) -> None:
        """Answer the prompts of the next round."""
        prompts = self.load.prompts(next(self._rounds))
        self.answers += self.engine.generate(prompts, self.load.tokens)

    def move(self, change: Callable[[Placement], Placement]) -> None:
        """Order a changed version of the current placement, and wait until the engine has adopted it."""
        if self._moving:
            self._order([change(self.engine.placement())])
            self.engine.settle()
            self.moves += 1

    def serve_while_moving(self, count: int, change: Callable[[Placement], Placement]) -> None:
        """Answer the next round's prompts while the engine adopts up to ``count`` placements.

        ``change`` turns each placement into the next one. Raises ``EngineError`` if the engine adopts no placement
        while it answers.
        """
        before = self.engine.adopted()
        if self._moving:
            placement = self.engine.placement()
            self._order([placement := change(placement) for _ in range(count)])
        self.serve()
        if self._moving:
            during = self.engine.adopted() - before
            if not during:
                raise EngineError("no placement was adopted under load; increase --tokens")
            self.engine.settle()
            self.moves += during

    def _order(self, placements: Iterable[Placement]) -> None:
        current = self.engine.placement()
        for placement in placements:
            self.experts += int((placement != current).sum())
            self.engine.order(placement)
            current = placement


@dataclass(frozen=True)
class Scenario:
    """A way to move experts while an engine serves.

    Parameters
    ----------
    name
        Name on the command line and in reports.
    play
        Function that serves requests and moves experts.
    setup
        Options for starting the engine.
    own_engine
        True if the scenario changes the state of its engine. It then uses two engines that no other scenario uses, one
        with and one without moves.
    """

    name: str
    play: Callable[[Session], None]
    setup: Setup = field(default_factory=Setup)
    own_engine: bool = False


def _no_moves(session: Session) -> None:
    """Serve twice, to show that the engine's answers can be compared."""
    session.serve()
    session.serve()


def _rotate(session: Session) -> None:
    """Repeatedly move every expert of every layer by one slot, until each has been in every slot."""
    for _ in range(min(session.engine.placement().shape[1], session.load.moves)):
        session.move(rotated)
        session.serve()


def _swap(session: Session) -> None:
    """Exchange every pair of slots, in rounds of disjoint pairs."""
    rounds = len(swap_rounds(session.engine.placement().shape[1]))
    for number in range(min(rounds, session.load.moves)):
        session.move(lambda placement, number=number: swapped(placement, number))  # type: ignore[misc]
        session.serve()


def _random(session: Session) -> None:
    """Adopt random placements with different replica counts."""
    count = min(_RANDOM, session.load.moves)
    for placement in random_placements(session.engine.placement(), count, session.load.seed):
        session.move(lambda _, placement=placement: placement)  # type: ignore[misc]
        session.serve()


def _under_load(session: Session) -> None:
    """Rotate the experts at each of the engine's rearrangements while it serves requests."""
    session.serve_while_moving(session.load.moves, rotated)
    session.serve_while_moving(session.load.moves, rotated)


def _sleep(session: Session) -> None:
    """Move experts, sleep, serve, move experts again and serve."""
    session.move(rotated)
    session.serve()
    session.engine.sleep_and_wake()
    session.serve()
    session.move(rotated)
    session.serve()


def _reload(session: Session) -> None:
    """Move experts, reload the weights, serve, move experts again and serve."""
    session.move(rotated)
    session.serve()
    session.engine.reload()
    session.serve()
    session.move(rotated)
    session.serve()


def _quantised(session: Session) -> None:
    """Rotate the experts, then adopt random placements."""
    for _ in range(min(_RANDOM, session.load.moves)):
        session.move(rotated)
        session.serve()
    _random(session)


NO_MOVES = Scenario("no-moves", _no_moves)
ROTATE = Scenario("rotate", _rotate)
QUANTISED = Scenario("quantised", _quantised, Setup(quantised=True), own_engine=True)
SCENARIOS = (
    NO_MOVES,
    ROTATE,
    Scenario("swap", _swap),
    Scenario("random", _random),
    Scenario("under-load", _under_load),
    Scenario("sleep", _sleep, Setup(sleeps=True), own_engine=True),
    Scenario("reload", _reload, own_engine=True),
    QUANTISED,
)
CONTROLS = (
    ("weight", ROTATE),
    ("table", ROTATE),
    ("last-weight", QUANTISED),
)
"""Faults that must be detected, and the scenario that must detect each.

If experts are quantised, the tensor that ``last-weight`` leaves behind is a scale.
"""
