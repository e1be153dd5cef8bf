"""A decision as each rank hears it."""

from __future__ import annotations

from eplb_service.control.core.plan_tracker import Offer
from eplb_service.planner.plan import LayerPlan
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.plan_codec import WireLayer, WirePlan, encode_plan, plan_digest, table_digest


def wire_plans(offer: Offer, leader_term: int, ranks: int) -> list[agent_pb2.Plan]:
    """One message per rank, equal in all but the rank's own tables."""
    updates = [milestone.update for milestone in offer.milestones]
    digests = [tuple(table_digest(table_E) for table_E in update.log2phy_RE) for update in updates]
    messages = []
    for rank in range(ranks):
        layers = tuple(
            _wire_layer(update, rank, tables) for update, tables in zip(updates, digests, strict=True)
        )
        digest = plan_digest(offer.plan_id, offer.base_epoch, offer.base_digest, layers)
        plan = WirePlan(offer.plan_id, leader_term, offer.base_epoch, offer.base_digest, layers, digest)
        messages.append(encode_plan(plan))
    return messages


def _wire_layer(update: LayerPlan, rank: int, table_digests: tuple[int, ...]) -> WireLayer:
    return WireLayer(update.layer, update.phy2log_RS, update.log2phy_RE[rank], table_digests, update.moves_M5)
