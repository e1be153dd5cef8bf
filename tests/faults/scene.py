"""A real service behind a proxy, and real ranks that serve until the scene ends."""

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
"""Longest wait for what must come: a busy machine is slow, and a wait ends as soon as it has come."""
OFTEN = ("--window-steps=64", "--decision-interval=32", "--report-steps=8")
FLAGS = (*OFTEN, "--heartbeat-seconds=0.2", "--cpu-share=100")


class RankCrew:
    """``ranks`` processes that serve towards ``address`` in the background."""

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
        self._ranks, self._deadline = ranks, deadline
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
        """Have these ranks do it to themselves, each at its next step."""
        for rank in ranks or range(self._ranks):
            (self.folder / f"{rank}.{fault}").touch()

    def freeze(self, rank: int, seconds: float) -> None:
        """Stop a rank's process for so long, and let it go on."""
        process = int((self.folder / f"pid-{rank}").read_text())
        os.kill(process, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(process, signal.SIGCONT)

    def stop(self) -> list[Facts]:
        """End them; what each saw. Raises what made one fail."""
        (self.folder / "stop").touch()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._facts

    def end_well(self) -> list[Facts]:
        """End them; what each saw, which must be a served model and balancing that still goes on."""
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
    """Service, proxy and ranks; ``store`` keeps the service's state over restarts."""

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
        """What the service believes that is served."""
        return self.service.status().status.epoch

    def wait_for_switches(self, more: int = 1) -> None:
        """Until the deployment's epoch has grown by ``more``."""
        goal = self.epoch + more
        self.service.wait_until(lambda status: status.status.epoch >= goal, PATIENCE)

    def wait_for_rest(self) -> int:
        """Until the deployment's epoch has not grown for seconds; the epoch then."""
        deadline, epoch = time.monotonic() + PATIENCE, -1
        while (now := self.epoch) != epoch:
            assert time.monotonic() < deadline, "layers are switched on and on"
            epoch = now
            time.sleep(3.0)
        return epoch

    def wait_for_problem(self, text: str) -> None:
        """Until the operator sees something that says ``text``."""
        self.service.wait_until(lambda status: text in " ".join(status.status.problems), PATIENCE)

    def wait_for_word(self, *texts: str) -> None:
        """Until the service's log says one of these: a later plan soon hides a problem in its status."""
        self.service.wait_until(
            lambda _: any(text in self.service.log.read_text() for text in texts), PATIENCE
        )

    def wait_for_metric(self, name: str, least: float, **labels: str) -> None:
        """Until /metrics shows at least this much: it follows what happens, a moment later."""
        self.service.wait_until(lambda _: self.service.metric(name, **labels) >= least, PATIENCE)

    def wait_for_ranks(self) -> None:
        """Until every rank's stream is alive."""
        self.service.wait_until(lambda status: status.status.agents_connected == self._ranks, PATIENCE)
