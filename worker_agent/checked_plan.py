"""Plans from the service, checked against what this rank serves before the switch sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eplb_service.placement import Int32
from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.plan import RankPlan, check_moves, decode_plan
from worker_agent.identity import Identity
from worker_agent.swap.installed import Installed


@dataclass(frozen=True)
class CheckedPlan:
    """A plan, and the digest of the placement that its moves were checked against."""

    plan: RankPlan
    checked_for: int


def check_plan(message: agent_pb2.Plan, identity: Identity, installed: Installed) -> CheckedPlan:
    """The plan, if this rank could carry it out.

    A plan for another epoch passes: the machine refuses it.

    Raises
    ------
    WireError
        A layer is no valid placement, its moves do not lead from what is installed to it, ranks that share tokens
        would get different tables, or an expert would leave a rank that it is bound to.
    """
    plan = decode_plan(message, identity.shape, identity.rank)
    if identity.rank_bound:
        for layer in plan.layers:
            _check_bound(layer.layer, layer.phy2log_RS, installed.placement.phy2log_LRS[layer.layer])
    if plan.base_digest == installed.digest:
        for layer in plan.layers:
            check_moves(installed.placement.phy2log_LRS[layer.layer], layer.phy2log_RS, layer.moves_M5)
    for layer in plan.layers:
        _check_shared_tables(layer.layer, layer.log2phy_digests, identity.token_groups)
    return CheckedPlan(plan, installed.digest)


def _check_bound(layer: int, phy2log_RS: Int32, installed_RS: Int32) -> None:
    for rank, (slots_S, installed_S) in enumerate(zip(phy2log_RS, installed_RS, strict=True)):
        strangers = np.setdiff1d(slots_S, installed_S)
        if strangers.size:
            raise WireError(
                f"layer {layer} phy2log: rank {rank} would get expert {strangers[0]}, but grouped experts stay on "
                "their ranks"
            )


def _check_shared_tables(layer: int, digests: Sequence[int], token_groups: Sequence[int]) -> None:
    first_of: dict[int, int] = {}
    for rank, group in enumerate(token_groups):
        first = first_of.setdefault(group, rank)
        if digests[rank] != digests[first]:
            raise WireError(
                f"layer {layer} log2phy: ranks {first} and {rank} see the same tokens but would get different tables"
            )
