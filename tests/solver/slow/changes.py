"""One random change of a placement: what it leaves, whether it may be made, and every change that there is."""

from __future__ import annotations

import itertools

import numpy as np

from eplb_service.solver.annealing import _Move
from tests.solver.slow.heat import even_shares


def every_try(phy2log_RS, episode=-1):
    """All changes, the illegal ones included."""
    places = list(np.ndindex(phy2log_RS.shape))
    for (rank, slot), (other, place), swaps in itertools.product(places, places, (True, False)):
        mine, theirs = int(phy2log_RS[rank, slot]), int(phy2log_RS[other, place])
        yield _Move(rank, slot, other, place, mine, theirs, swaps, episode)


def after(phy2log_RS, attempt):
    """The placement once a change is made."""
    phy2log_RS = phy2log_RS.copy()
    phy2log_RS[attempt.other, attempt.place] = attempt.mine
    if attempt.swaps:
        phy2log_RS[attempt.rank, attempt.slot] = attempt.theirs
    return phy2log_RS


def is_legal(phy2log_RS, attempt):
    """Two ranks and two experts, of which none ends up twice on a rank, and none nowhere."""
    after_RS = after(phy2log_RS, attempt)
    apart = attempt.rank != attempt.other and attempt.mine != attempt.theirs
    whole = set(after_RS.flat) == set(phy2log_RS.flat)
    return apart and whole and all(len(set(row)) == len(row) for row in after_RS.tolist())


def room(phy2log_RS, attempt, scaled_EN):
    """How far the ranks that a change may burden stay below what ``rank`` has in the episode now.

    A swap has ``rank`` itself among them: it must get cooler. A replica that passes on burdens who gets it and who
    still holds the expert that gave it up; that older replicas of the other get thinner is not counted.
    """
    after_RS = after(phy2log_RS, attempt)
    share_RS, heat_E = even_shares(phy2log_RS), scaled_EN[:, attempt.episode]
    limit = (share_RS * heat_E[phy2log_RS])[attempt.rank].sum()
    if attempt.swaps:
        burdened = [attempt.rank, attempt.other]
        after_share_RS = even_shares(after_RS)
    else:
        burdened = (phy2log_RS == attempt.theirs).any(axis=1)
        after_share_RS = np.where(phy2log_RS == attempt.mine, share_RS, even_shares(after_RS))
    load_R = (after_share_RS * heat_E[after_RS]).sum(axis=1)
    return (limit - load_R[burdened]).min()
