"""A real service behind a proxy, with real ranks that serve until the scene ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.e2e.service import Service
from tests.faults.proxy import Proxy
from tests.faults.serving import WELL_BEHAVED, Facts, Manners, check_served, serve
from tests.ranks import run_ranks

RANKS = 3
PATIENCE = 180.0
"""Longest time to wait for an event, in seconds.

It is long because the machine may be busy, but a wait ends as soon as the event occurs.
"""
OFTEN = ("--window-steps=64", "--decision-interval=32", "--report-steps=8")
FLAGS = (*OFTEN, "--heartbeat-seconds=0.2", "--cpu-share=100")


class RankCrew:
    """Crew of ``ranks`` processes, which serve in the background and connect to the service at ``address``."""

    def __init__(
        self,
        folder: Path,
        address: str,
        ranks: int = RANKS,
        deadline: float = 4 * PATIENCE,
        manners: Manners = WELL_BEHAVED,
        **changes: Any,
    ) -> None:
        self.folder = folder
        self._facts: list[Facts] = []
        self._failure: BaseException | None = None
        self._ranks = ranks
        self._deadline = deadline
        self._served = (address, str(folder), changes, manners)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> RankCrew:
        (self.folder / "stop").unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()
        self._thread.join()

    def ask(self, fault: str, *ranks: int) -> None:
        """Ask each of these ranks to inject the fault into itself at its next step."""
        for rank in ranks or range(self._ranks):
            (self.folder / f"{rank}.{fault}").touch()

    def freeze(self, rank: int, seconds: float) -> None:
        """Suspend a rank's process for ``seconds``."""
        process = int((self.folder / f"pid-{rank}").read_text())
        os.kill(process, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(process, signal.SIGCONT)

    def stop(self) -> list[Facts]:
        """Stop the ranks and return the facts from each. If a rank failed, its exception is raised."""
        (self.folder / "stop").touch()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._facts

    def end_well(self) -> list[Facts]:
        """Stop the ranks and return the facts of each.

        Check that they served correctly and that balancing still runs.
        """
        facts = self.stop()
        check_served(facts, self.folder)
        assert [fact.halted for fact in facts] == [None] * self._ranks
        return facts

    def _run(self) -> None:
        try:
            self._facts = run_ranks(self._ranks, serve, *self._served, deadline=self._deadline)
        except BaseException as failure:
            self._failure = failure


class Scene(RankCrew):
    """A service, a proxy and ranks. If ``store`` is true, the service's state survives restarts."""

    def __init__(self, folder: Path, *, store: bool = True, **changes: Any) -> None:
        kept = ("--store", str(folder / "state.sqlite3") if store else ":memory:")
        self.service = Service(folder, *FLAGS, *kept)
        self.service.start()
        self.proxy = Proxy(self.service.address)
        super().__init__(folder, self.proxy.address, **changes)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.proxy.close()
        self.service.__exit__(None, None, None)

    def __enter__(self) -> Scene:
        super().__enter__()
        self.wait_for_ranks()
        return self

    @property
    def epoch(self) -> int:
        """The epoch that the service believes the ranks serve."""
        return self.service.status().status.epoch

    def wait_for_switches(self, switches: int = 1) -> None:
        """Wait until the deployment's epoch has grown by ``switches``."""
        goal = self.epoch + switches
        self.service.wait_until(lambda status: status.status.epoch >= goal, PATIENCE)

    def wait_for_rest(self) -> int:
        """Wait until the deployment's epoch has not changed for several seconds, and return it."""
        deadline = time.monotonic() + PATIENCE
        epoch = -1
        while (now := self.epoch) != epoch:
            assert time.monotonic() < deadline, "layers keep switching"
            epoch = now
            time.sleep(3.0)
        return epoch

    def wait_for_problem(self, text: str) -> None:
        """Wait until the deployment's status lists a problem that contains ``text``."""
        self.service.wait_until(lambda status: text in " ".join(status.status.problems), PATIENCE)

    def wait_for_word(self, *texts: str) -> None:
        """Wait until the service's log contains one of these strings.

        The log is used because a later plan soon hides a problem in the status.
        """
        self.service.wait_until(
            lambda _: any(text in self.service.log.read_text() for text in texts), PATIENCE
        )

    def wait_for_metric(self, name: str, least: float, **labels: str) -> None:
        """Wait until the metric reaches this value. /metrics lags slightly behind the events."""
        self.service.wait_until(lambda _: self.service.metric(name, **labels) >= least, PATIENCE)

    def wait_for_ranks(self) -> None:
        """Wait until every rank's stream is connected."""
        self.service.wait_until(lambda status: status.status.agents_connected == self._ranks, PATIENCE)
