"""A decision as it is offered: the version that each of its layers leads to, and what each rank receives of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.placement import combine_digests, layer_digest
from eplb_service.planner.plan import LayerPlan, Plan
from eplb_service.wire.plan import RankLayer, RankPlan, table_digest


@dataclass(frozen=True)
class Milestone:
    """One layer of a plan, and the version that the deployment serves once it has switched."""

    update: LayerPlan
    epoch: int
    digest: int

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest."""
        return self.epoch, self.digest


@dataclass(frozen=True)
class Offer:
    """A decision as it is offered: where it starts, its layers in order, and what each leads to."""

    plan_id: int
    base_epoch: int
    base_digest: int
    milestones: tuple[Milestone, ...]
    decision: Plan

    @classmethod
    def of(cls, plan_id: int, base: LivePlacement, decision: Plan) -> Offer:
        """Follow the decision's layers from ``base``."""
        digests = list(base.layer_digests)
        milestones = []
        for epoch, update in enumerate(decision.layers, start=base.epoch + 1):
            digests[update.layer] = layer_digest(update.layer, update.phy2log_RS)
            milestones.append(Milestone(update, epoch, combine_digests(base.placement.experts, digests)))
        return cls(plan_id, base.epoch, base.digest, tuple(milestones), decision)


def rank_plans(offer: Offer, leader_term: int, ranks: int) -> list[RankPlan]:
    """What each of the first ``ranks`` ranks receives; equal in all but the rank's own tables."""
    updates = [milestone.update for milestone in offer.milestones]
    digests = [tuple(table_digest(table_E) for table_E in update.log2phy_RE) for update in updates]

    def layers(rank: int) -> tuple[RankLayer, ...]:
        return tuple(
            RankLayer(update.layer, update.phy2log_RS, update.log2phy_RE[rank], tables, update.moves_M5)
            for update, tables in zip(updates, digests, strict=True)
        )

    first = RankPlan.of(offer.plan_id, leader_term, offer.base_epoch, offer.base_digest, layers(0))
    return [first, *(replace(first, layers=layers(rank)) for rank in range(1, ranks))]
