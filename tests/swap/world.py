"""A world of three ranks' switch machines, without clock, sockets or tensors: what happens is what a script says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplb_service.placement import Int32, Placement, default_log2phy
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest
from worker_agent.swap.actions import Action, Commit, StartTransfer
from worker_agent.swap.ballot import Outcome, Progress
from worker_agent.swap.installed import Installed
from worker_agent.swap.machine import SwitchState, Transition

RANKS, LAYERS, EXPERTS, SLOTS = 3, 2, 4, 2
OFFER_DEADLINE = 8
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)


def layer_RS(turn: int) -> Int32:
    """A valid layer, another for each ``turn`` of the experts."""
    rolled_RS = (LINEAR.phy2log_LRS[0] + turn) % EXPERTS
    return np.ascontiguousarray(rolled_RS, dtype=np.int32)


class World:
    """Three ranks that hear plans, transfer and vote.

    After every event the invariants are checked: all ranks serve the same placement at the same epoch, they start
    the same transfers on the same lanes, and a layer is committed only where every rank has staged it.
    """

    def __init__(self) -> None:
        tables_RLE = LINEAR.default_log2phy()
        self.ranks = [
            SwitchState(Installed.first(rank, LINEAR, tables_RLE[rank]), OFFER_DEADLINE)
            for rank in range(RANKS)
        ]
        self.actions: list[list[Action]] = [[] for _ in range(RANKS)]
        self.transfers: list[StartTransfer | None] = [None] * RANKS
        self.step = 0
        self._ballots: list[list[int]] | None = None

    def plan(
        self, plan_id: int, turns: Sequence[tuple[int, int]] = ((0, 1),), term: int = 1
    ) -> list[RankPlan]:
        """A plan for each rank, from what is served now: ``(layer, turn)`` in order."""
        base = self.ranks[0].installed
        layers: list[list[RankLayer]] = [[] for _ in range(RANKS)]
        for layer, turn in turns:
            new_RS = layer_RS(turn)
            tables_RE = default_log2phy(new_RS, EXPERTS)
            digests = tuple(table_digest(row) for row in tables_RE)
            moves_M5 = np.zeros((0, 5), dtype=np.int32)
            for rank in range(RANKS):
                layers[rank].append(RankLayer(layer, new_RS, tables_RE[rank], digests, moves_M5))
        return [RankPlan.of(plan_id, term, base.epoch, base.digest, tuple(own)) for own in layers]

    def deliver(self, plans: Sequence[RankPlan], *ranks: int) -> None:
        """The plan reaches these ranks, or all where none is named."""
        for rank in ranks or range(RANKS):
            self._note(
                rank, self.ranks[rank].offer(plans[rank], self.step, self.ranks[rank].installed.digest)
            )

    def end_transfer(self, rank: int, error: str | None = None) -> None:
        """The rank's transfer, if one runs, has staged everything or failed."""
        running, self.transfers[rank] = self.transfers[rank], None
        if running is not None:
            self.ranks[rank] = self.ranks[rank].with_transfer_ended(running.generation, error)

    def end_transfers(self) -> None:
        """All running transfers have staged everything."""
        for rank in range(RANKS):
            self.end_transfer(rank)

    def launch_vote(self) -> None:
        """Ballots leave all ranks; what happens after this is not in them."""
        self._ballots = [machine.ballot.encode() for machine in self.ranks]

    def count_vote(self) -> None:
        """The outcome of the last launch reaches all ranks."""
        if self._ballots is None:
            return
        outcome = Outcome.decode([min(column) for column in zip(*self._ballots, strict=True)])
        self._ballots = None
        ready = [machine.progress == Progress.READY for machine in self.ranks]
        transitions = [machine.decide(outcome) for machine in self.ranks]
        for rank, transition in enumerate(transitions):
            self._note(rank, transition)
        actions = [asked_for for _, asked_for in transitions]
        started = {
            (a.generation, a.lane, a.layer.layer)
            for asked_for in actions
            for a in asked_for
            if isinstance(a, StartTransfer)
        }
        starters = sum(any(isinstance(a, StartTransfer) for a in asked_for) for asked_for in actions)
        assert len(started) <= 1
        assert starters in (0, RANKS)
        if any(isinstance(a, Commit) for asked_for in actions for a in asked_for):
            assert all(ready)
        self.check()

    def vote(self) -> None:
        """A whole vote, nothing in between."""
        self.launch_vote()
        self.count_vote()

    def pass_steps(self, steps: int) -> None:
        """The model makes steps."""
        for _ in range(steps):
            self.step += 1
            self.ranks = [machine.at_step(self.step) for machine in self.ranks]

    def check(self) -> None:
        """What must hold at every step."""
        assert len({machine.installed.digest for machine in self.ranks}) == 1
        assert len({machine.installed.epoch for machine in self.ranks}) == 1

    def action_kinds(self, rank: int) -> list[str]:
        """Names of the actions that a rank has been asked for so far."""
        return [type(action).__name__ for action in self.actions[rank]]

    def halt(self, rank: int) -> None:
        """Something breaks on a rank."""
        self._note(rank, self.ranks[rank].halt("broken"))

    def _note(self, rank: int, transition: Transition) -> None:
        self.ranks[rank], actions = transition
        self.actions[rank] += actions
        for action in actions:
            if isinstance(action, StartTransfer):
                assert self.transfers[rank] is None, "a transfer begins while another runs"
                self.transfers[rank] = action
