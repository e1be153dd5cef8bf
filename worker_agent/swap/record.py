"""Records what one rank does as JSON lines: votes, transfers, commits, aborts, heat.

Written by the model's thread and flushed as it goes, so that a rank that is killed leaves all but its last moments.
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
    """File of one rank, ``rank-N-GROUP.jsonl`` in ``folder``; records nothing where that is ``None``.

    A disk that fails ends the recording with a warning, never anything else.
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
            _log.warning("rank %d: no history is recorded: %s", identity.rank, error)
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
        self, step: int, number: int, cast: Ballot | None, outcome: VoteOutcome, *, heard: bool = True
    ) -> None:
        """Record this rank's ballot ``cast``, and the ``outcome`` that vote ``number`` had for all ranks at ``step``.

        ``heard`` is false where the register said what became of it.
        """
        if cast is not None:
            self._write(
                "vote",
                step=step,
                number=number,
                heard=heard,
                progress=cast.progress.name,
                plan=cast.plan,
                abort=cast.abort or cast.called_off,
                installed=cast.installed,
                decision=outcome.result.name,
            )

    def action(self, step: int, action: Action) -> None:
        """Record what the machine asks for: transfers, commits, dropped plans and halts."""
        match action:
            case StartTransfer(layers, generation, lane):
                indices = [layer.layer for layer in layers]
                self._write("transfer", step=step, generation=generation, lane=lane, layers=indices)
            case Commit():
                self._committed(step, action)
            case Halted(reason):
                self._write("halt", step=step, reason=reason)
            case PlanStatus(state=PlanState.ABORTED | PlanState.CALLED_OFF):
                facts = {"plan_id": action.plan_id, "layer": action.layer, "reason": action.reason}
                self._write("abort", step=step, **facts)

    def _committed(self, step: int, commit: Commit) -> None:
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
        """Record that counts of some steps are about to be sent."""
        self._write(
            "heat", first_step=report.first_step, steps=report.steps, layer_epochs=report.layer_epochs
        )

    def close(self, step: int) -> None:
        """Record that the agent ends after ``step`` steps, and close the file."""
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
            _log.warning("the recording of history has ended: %s", error)
