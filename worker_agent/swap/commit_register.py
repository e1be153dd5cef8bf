"""The last word on a vote that some ranks heard and others did not.

Where a link fails in the middle of the vote that would commit a layer, one rank may hold the outcome and another only
an error. Going on would route tokens to the wrong weights. So every rank that could be about to commit writes what it
believes into one compare-and-set register per vote, and obeys what it holds then: the first writer decides.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch.distributed as dist

_COMMIT, _ABORT = "commit", "abort"


class FatalSwitchError(RuntimeError):
    """This rank cannot know that its weights are those its peers route to; it must not serve another token.

    The one error that an agent lets through to the model: a wrong token is worse than none.
    """


class CommitRegister:
    """One register per vote on the agents' own store.

    A store's ``compare_set`` has no deadline of its own, so it is called on a thread that can be given up.

    Parameters
    ----------
    store
        A connection that nothing else uses: a call that waits would hold up the others.
    timeout
        Longest wait for the register.
    """

    def __init__(self, store: dist.Store, timeout: timedelta) -> None:
        self._store = store
        self._timeout = timeout
        self._questions: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()
        self._out_of_reach = False
        threading.Thread(target=self._run, name="eplb-commit-register", daemon=True).start()

    def may_commit(self, vote: int, *, heard: bool) -> bool:
        """Whether the layer is committed, given whether this rank ``heard`` the vote decide so.

        Raises ``FatalSwitchError`` where the register is out of reach.
        """
        written: str | Exception = TimeoutError("an earlier question was never answered")
        if not self._out_of_reach:
            self._questions.put((vote, _COMMIT if heard else _ABORT))
            try:
                written = self._answers.get(timeout=self._timeout.total_seconds())
            except queue.Empty:
                # A late answer must not be taken for that to another question.
                self._out_of_reach = True
                written = TimeoutError(f"no answer within {self._timeout.total_seconds():g} s")
        if isinstance(written, Exception):
            raise FatalSwitchError(
                f"vote {vote} may have committed a layer, and the store is gone: {written}"
            ) from written
        return written == _COMMIT

    def close(self) -> None:
        """Let the thread end."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            vote, wish = question
            try:
                self._answers.put(self._store.compare_set(f"eplb/outcome/{vote}", "", wish).decode())
            except Exception as error:
                self._answers.put(error)
