"""The last word on a vote that some ranks heard and others did not.

Where a link fails in the middle of the vote that would commit a layer, one rank may hold the outcome and another only
an error. Going on would route tokens to the wrong weights. So every rank that could be about to commit writes what it
believes into one compare-and-set register per vote, and obeys what stands there: the first writer decides.
"""

from __future__ import annotations

import torch.distributed as dist

_COMMIT, _ABORT = "commit", "abort"


class FatalSwitchError(RuntimeError):
    """This rank cannot know that its weights are those its peers route to; it must not serve another token.

    The one error that an agent lets through to the model: a wrong token is worse than none.
    """


class Arbiter:
    """One register per vote on the agents' own store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def may_commit(self, vote: int, *, heard: bool) -> bool:
        """Whether the layer is committed, given whether this rank ``heard`` the vote decide so.

        Raises ``FatalSwitchError`` where the register is out of reach.
        """
        wish = _COMMIT if heard else _ABORT
        try:
            stands = self._store.compare_set(f"eplb/outcome/{vote}", "", wish)
        except RuntimeError as error:
            raise FatalSwitchError(
                f"vote {vote} may have committed a layer, and the store is gone: {error}"
            ) from error
        return bool(stands.decode() == _COMMIT)
