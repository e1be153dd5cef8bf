"""Records what one rank does as JSON lines: votes, transfers, commits, aborts, heat.

Written by the model's thread and flushed as it goes, so that a rank that is killed leaves all but its last moments.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from eplb_service.wire.heat import HeatReport
from worker_agent.identity import Identity
from worker_agent.swap.actions import Aborted, Commit, StartTransfer
from worker_agent.swap.ballot import Ballot, Outcome
from worker_agent.swap.installed import Installed

_log = logging.getLogger("eplb.agent")


class History:
    """One rank's file ``rank-N.jsonl`` in ``folder``; records nothing where that is ``None``.

    A disk that fails ends the recording with a warning, never anything else.
    """

    def __init__(self, folder: Path | None, identity: Identity, installed: Installed) -> None:
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
            ranks=identity.ranks,
            group=identity.group_id,
            epoch=installed.epoch,
            digest=installed.digest,
            layer_epochs=installed.layer_epochs,
        )

    def vote(
        self, step: int, number: int, cast: Ballot | None, outcome: Outcome, *, heard: bool = True
    ) -> None:
        """A vote was counted, or decided by its register.

        Parameters
        ----------
        step, number
            Step boundary at which it was counted, and the vote's number.
        cast
            This rank's ballot; without one nothing is recorded.
        outcome
            What follows on all ranks.
        heard
            Whether this rank has counted it; otherwise its register said what became of it.
        """
        if self._file is None or cast is None:
            return
        self._write(
            "vote",
            step=step,
            number=number,
            heard=heard,
            progress=cast.progress.name,
            plan=cast.plan,
            abort=cast.abort,
            installed=cast.installed,
            decision=outcome.result.name,
        )

    def transfer(self, step: int, started: StartTransfer) -> None:
        """A transfer begins."""
        self._write(
            "transfer",
            step=step,
            generation=started.generation,
            lane=started.lane,
            layer=started.layer.layer,
        )

    def committed(self, step: int, commit: Commit) -> None:
        """A layer is in place."""
        self._write(
            "commit",
            step=step,
            plan_id=commit.plan_id,
            generation=commit.generation,
            layer=commit.layer.layer,
            before=[commit.before.epoch, commit.before.digest],
            after=[commit.after.epoch, commit.after.digest],
            layer_epochs=commit.after.layer_epochs,
        )

    def aborted(self, step: int, abort: Aborted) -> None:
        """A plan was dropped."""
        self._write("abort", step=step, plan_id=abort.plan_id, layer=abort.layer, reason=abort.reason)

    def halted(self, step: int, reason: str) -> None:
        """Balancing has stopped on this rank."""
        self._write("halt", step=step, reason=reason)

    def heat(self, report: HeatReport) -> None:
        """Counts of some steps are about to be sent."""
        self._write(
            "heat",
            first_step=report.first_step,
            steps=report.steps,
            layer_epochs=report.layer_epochs,
        )

    def close(self, step: int) -> None:
        """The agent ends after ``step`` steps."""
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
