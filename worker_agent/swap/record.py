"""Records one rank's votes, transfers, commits, aborts and heat as JSON lines.

The model's thread writes and flushes each line, so a rank that is killed loses at most its last line.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from eplb_core.wire.agent import PlanState, PlanStatus
from eplb_core.wire.heat import HeatReport
from worker_agent.swap.machine import Action, Ballot, Commit, Halted, StartTransfer, VoteOutcome
from worker_agent.swap.rank_layout import Identity, RankLayout

_log = logging.getLogger("eplb.agent")


class History:
    """History file of one rank. A disk failure stops the recording with a warning, and has no other effect.

    Parameters
    ----------
    folder
        Directory for the file ``rank-N-GROUP.jsonl``; ``None`` to record nothing.
    identity
        Identity of this rank.
    installed
        Initial layout.
    """

    def __init__(self, folder: Path | None, identity: Identity, installed: RankLayout) -> None:
        self._file: TextIO | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{identity.rank}-{identity.group_id}.jsonl"
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            _log.warning("rank %d: cannot record its history: %s", identity.rank, error)
        self._write(
            "start",
            rank=identity.rank,
            ranks=identity.shape.ranks,
            group=identity.group_id,
            epoch=installed.epoch,
            digest=installed.digest,
            layer_epochs=installed.layer_epochs,
        )

    def vote(
        self, step: int, number: int, ballot: Ballot | None, outcome: VoteOutcome, *, has_outcome: bool = True
    ) -> None:
        """Record a vote.

        Parameters
        ----------
        step
            Step at which the vote was counted or settled.
        number
            Vote number.
        ballot
            This rank's ballot. If ``None``, nothing is recorded.
        outcome
            Outcome of the vote, which is the same for all ranks.
        has_outcome
            True if this rank received the outcome; False if it settled the vote with its peers.
        """
        if ballot is not None:
            self._write(
                "vote",
                step=step,
                number=number,
                heard=has_outcome,
                progress=ballot.progress.name,
                plan=ballot.plan,
                abort=ballot.abort or ballot.called_off,
                installed=ballot.installed,
                decision=outcome.result.name,
            )

    def action(self, step: int, action: Action) -> None:
        """Record an action of the state machine, such as a transfer, commit, dropped plan or halt."""
        match action:
            case StartTransfer(layers, generation, lane):
                indices = [layer.layer for layer in layers]
                self._write("transfer", step=step, generation=generation, lane=lane, layers=indices)
            case Commit():
                self._write_commit(step, action)
            case Halted(reason):
                self._write("halt", step=step, reason=reason)
            case PlanStatus(state=PlanState.ABORTED | PlanState.CALLED_OFF):
                facts = {"plan_id": action.plan_id, "layer": action.layer, "reason": action.reason}
                self._write("abort", step=step, **facts)

    def _write_commit(self, step: int, commit: Commit) -> None:
        """Record a commit, with one line per layer."""
        before = commit.before
        for layer, after in zip(commit.layers, commit.installed, strict=True):
            self._write(
                "commit",
                step=step,
                plan_id=commit.plan_id,
                generation=commit.generation,
                layer=layer.layer,
                before=[before.epoch, before.digest],
                after=[after.epoch, after.digest],
                layer_epochs=after.layer_epochs,
            )
            before = after

    def heat(self, report: HeatReport) -> None:
        """Record a heat report that is about to be sent."""
        self._write(
            "heat", first_step=report.first_step, steps=report.steps, layer_epochs=report.layer_epochs
        )

    def close(self, step: int) -> None:
        """Record that the agent ended after ``step`` steps, and close the file."""
        self._write("end", step=step)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, **facts: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
        except OSError as error:
            self._file = None
            _log.warning("stopped recording the history: %s", error)
