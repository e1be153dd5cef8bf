"""Between the agent's own types and the wire's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplb_service import __version__
from eplb_service.wire.codec import PROTOCOL_VERSION, WireError, pack
from eplb_service.wire.generated import agent_pb2
from eplb_service.wire.plan_codec import WirePlan, check_moves, decode_plan
from worker_agent.heat import HeatSegment
from worker_agent.identity import Identity
from worker_agent.swap.installed import Installed


def hello(identity: Identity, installed: Installed) -> agent_pb2.Hello:
    """Who this rank is and what it serves."""
    return agent_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        deployment=identity.deployment,
        rank=identity.rank,
        ep_size=identity.ranks,
        node=identity.node,
        token_group=identity.token_groups[identity.rank],
        shape=agent_pb2.ModelShape(
            layers=identity.layers,
            experts=identity.experts,
            slots=identity.slots,
            bytes_per_expert=identity.bytes_per_expert,
        ),
        placement=agent_pb2.PlacementState(
            epoch=installed.epoch,
            digest=installed.digest,
            layer_epochs=installed.layer_epochs,
            local_physical_to_logical=pack(installed.placement.phy2log_LRS[:, installed.rank]),
            log2phy=pack(installed.log2phy_LE),
        ),
        agent_version=__version__,
        group_id=identity.group_id,
    )


def heat_report(segment: HeatSegment, dropped_steps: int) -> agent_pb2.HeatReport:
    """One segment, packed."""
    sources = segment.source_counts_TLE
    return agent_pb2.HeatReport(
        first_step=segment.first_step,
        layer_epochs=segment.layer_epochs,
        slot_counts=pack(segment.slot_counts_TLS),
        source_counts=None if sources is None else pack(sources),
        step_phases=bytes(segment.phases),
        dropped_steps=dropped_steps,
        step_tokens=segment.tokens,
    )


@dataclass(frozen=True)
class HeardPlan:
    """A plan, and the digest of the placement that its moves were checked against."""

    plan: WirePlan
    checked_for: int


def checked_plan(message: agent_pb2.Plan, identity: Identity, installed: Installed) -> HeardPlan:
    """The plan, if this rank could carry it out.

    Raises ``WireError`` where a layer is no valid placement, its moves do not lead from what is installed to it, or
    ranks that share tokens would get different tables. A plan for another epoch passes: the machine refuses it.
    """
    plan = decode_plan(
        message, identity.layers, identity.ranks, identity.slots, identity.experts, rank=identity.rank
    )
    if plan.base_digest == installed.digest:
        for layer in plan.layers:
            check_moves(installed.placement.phy2log_LRS[layer.layer], layer.phy2log_RS, layer.moves_M5)
    for layer in plan.layers:
        _check_shared_tables(layer.layer, layer.log2phy_digests, identity.token_groups)
    return HeardPlan(plan, installed.digest)


def _check_shared_tables(layer: int, digests: Sequence[int], token_groups: Sequence[int]) -> None:
    first_of: dict[int, int] = {}
    for rank, group in enumerate(token_groups):
        first = first_of.setdefault(group, rank)
        if digests[rank] != digests[first]:
            raise WireError(
                f"layer {layer} log2phy: ranks {first} and {rank} see the same tokens but would get different tables"
            )
