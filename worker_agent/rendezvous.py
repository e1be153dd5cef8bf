"""How the agents of an EP group meet: each sends all what it holds, and what does not fit is refused by all alike."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from eplb_service.placement import MOST_ENTRIES, Int32, Placement, PlacementError, without_single_entries
from worker_agent.adapters.live_layer import ExpertWeights, LiveLayer, RankBound
from worker_agent.identity import Identity
from worker_agent.settings import AgentSettings
from worker_agent.swap.group import AgentGroup, RendezvousError, agree
from worker_agent.swap.installed import Installed
from worker_agent.swap.lane.backend import Backend, choose_backend
from worker_agent.swap.lane.lanes import Lanes

WeightShapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Type and shape of one expert, for each kind of weight that a kernel reads."""


@dataclass(frozen=True)
class Rendezvous:
    """What comes of it: the agents' group, its votes and lanes, who this rank is, and what is installed."""

    group: AgentGroup
    votes: dist.ProcessGroup
    lanes: Lanes
    identity: Identity
    installed: Installed


@dataclass(frozen=True)
class _Facts:
    """What one rank sends to the others."""

    nonce: str
    token_group: int
    shares_tokens: bool
    rank_bound: bool
    counts: tuple[str, ...]
    slots_LS: Int32
    experts: int
    bytes_per_expert: int
    width: int
    weights_by_layer: tuple[WeightShapes, ...]
    transfer_backend: Backend
    shared_settings: dict[str, object]
    complaint: str | None


def meet(
    layers: Sequence[LiveLayer],
    host_group: dist.ProcessGroup,
    settings: AgentSettings,
    token_group: int | None,
) -> Rendezvous:
    """Join the ranks of ``host_group`` and agree on who is who and what is installed. A collective.

    Parameters
    ----------
    layers
        The live layers of this rank, the same ones in the same order on every rank.
    host_group
        A CPU-capable process group over the EP ranks.
    token_group
        A number equal on all ranks that see the same tokens; ``None`` where this rank's tokens are its own.

    Raises
    ------
    RendezvousError
        On every rank, where shapes, settings or placements do not fit or a rank is out of reach.
    """
    rank = dist.get_rank(host_group)
    own = _facts(layers, settings, rank if token_group is None else token_group)
    group, facts = AgentGroup.join(
        host_group, settings.node, settings.data_host, own, settings.peer_timeout_seconds
    )
    _check_alike(facts)
    try:
        placement = Placement(np.stack([fact.slots_LS for fact in facts], axis=1), own.experts)
    except PlacementError as error:
        raise RendezvousError(f"the ranks do not hold a placement: {error}") from error
    complaint = None
    try:
        tables_LE = np.stack([_table(layer) for layer in layers])
        installed = Installed.first(rank, placement, tables_LE)
    except PlacementError as error:
        complaint = str(error)
    agree(host_group, complaint)
    lanes = Lanes(
        group,
        own.transfer_backend,
        _device(layers),
        timedelta(seconds=settings.transfer_timeout_seconds),
    )
    try:
        votes = group.process_group("vote")
        lanes.open_first()
    except RuntimeError as error:
        complaint = f"cannot reach the other ranks: {error}"
    agree(host_group, complaint)
    identity = Identity(
        deployment=settings.deployment,
        group_id=facts[0].nonce,
        rank=rank,
        ranks=len(facts),
        node=settings.node,
        token_groups=tuple(fact.token_group for fact in facts),
        layers=placement.layers,
        experts=placement.experts,
        slots=placement.slots,
        bytes_per_expert=own.bytes_per_expert,
        width=own.width,
        rank_bound=own.rank_bound,
    )
    return Rendezvous(group, votes, lanes, identity, installed)


def _facts(layers: Sequence[LiveLayer], settings: AgentSettings, token_group: int) -> _Facts:
    complaint = None
    shares_tokens, rank_bound = False, False
    counts: tuple[str, ...] = ()
    slots_LS = np.zeros((len(layers), 0), dtype=np.int32)
    experts, bytes_per_expert, width = 0, 0, 1
    weights_by_layer: tuple[WeightShapes, ...] = ()
    backend = Backend.GLOO
    try:
        slots_LS = np.stack([_local_slots(index, layer) for index, layer in enumerate(layers)])
        experts = int(layers[0].expert_map.shape[0])
        weights_by_layer = tuple(_weight_shapes(layer) for layer in layers)
        bytes_per_expert = sum(weight[0].nbytes for weight in layers[0].expert_weights())
        width = _dealing_width(layers, experts)
        counts = _counts(layers)
        shares_tokens = any(layer.shares_tokens for layer in layers)
        rank_bound = any(isinstance(layer, RankBound) and layer.rank_bound for layer in layers)
        backend = choose_backend(settings.transfer_backend, _device(layers).type)
    except Exception as error:
        # Whatever is wrong with this rank's layers, the others must hear of it rather than wait.
        complaint = str(error) if layers else None
    return _Facts(
        nonce=uuid.uuid4().hex,
        token_group=token_group,
        shares_tokens=shares_tokens,
        rank_bound=rank_bound,
        counts=counts,
        slots_LS=slots_LS,
        experts=experts,
        bytes_per_expert=bytes_per_expert,
        width=width,
        weights_by_layer=weights_by_layer,
        transfer_backend=backend,
        shared_settings=settings.shared(),
        complaint=complaint,
    )


def _device(layers: Sequence[LiveLayer]) -> torch.device:
    """Where the experts are; all of a rank's are on one device."""
    return layers[0].expert_weights()[0][0].device


def _weight_shapes(layer: LiveLayer) -> WeightShapes:
    return tuple((str(weight[0].dtype), tuple(weight[0].shape)) for weight in layer.expert_weights())


def _local_slots(index: int, layer: LiveLayer) -> Int32:
    """Logical expert of each local slot, int32 ``[S]``, from the layer's own ``expert_map``."""
    local_E = layer.expert_map.cpu().numpy()
    slots = len(layer.expert_weights()[0])
    here = np.flatnonzero(local_E >= 0)
    if sorted(local_E[here].tolist()) != list(range(slots)):
        raise ValueError(f"layer {index}: expert_map names {here.size} experts for {slots} slots")
    if layer.moe_load is not None and layer.moe_load.shape[1] != slots:
        raise ValueError(f"layer {index}: moe_load counts {layer.moe_load.shape[1]} slots, there are {slots}")
    for weight in layer.expert_weights():
        _check_weight(index, weight, slots)
    slots_S = np.zeros(slots, dtype=np.int32)
    slots_S[local_E[here]] = here
    return slots_S


def _table(layer: LiveLayer) -> Int32:
    """A layer's table on the host, int32 ``[E]``, or ``[E, D]`` of more than one entry."""
    table = layer.log2phy.cpu().numpy().astype(np.int32)
    return without_single_entries(table) if table.ndim == 2 else table


def _dealing_width(layers: Sequence[LiveLayer], experts: int) -> int:
    """Entries of the dealing tables, which all layers have alike."""
    shapes = {_table(layer).shape for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"all layers deal alike, got log2phy of the shapes {sorted(shapes)}")
    shape = shapes.pop()
    width = int(shape[1]) if len(shape) == 2 else 1
    if shape[:1] != (experts,) or len(shape) > 2 or not 1 <= width <= MOST_ENTRIES:
        raise ValueError(
            f"log2phy has the shape [{experts}], or [{experts}, entries] with at most {MOST_ENTRIES}; "
            f"got {list(shape)}"
        )
    return width


def _check_weight(index: int, weight: ExpertWeights, slots: int) -> None:
    if isinstance(weight, torch.Tensor):
        if weight.shape[0] != slots or not weight.is_contiguous():
            raise ValueError(
                f"layer {index}: expert weights must be contiguous with {slots} slots in front, "
                f"got the shape {list(weight.shape)}, strides {list(weight.stride())}"
            )
        return
    kinds = {(part.dtype, tuple(part.shape), part.is_contiguous()) for part in weight}
    if len(weight) != slots or len(kinds) != 1 or not weight[0].is_contiguous():
        raise ValueError(
            f"layer {index}: a list of expert weights must have {slots} contiguous tensors of one shape and type, "
            f"got {len(weight)} of {sorted(map(str, kinds))}"
        )


def _counts(layers: Sequence[LiveLayer]) -> tuple[str, ...]:
    """What all of a rank's layers count: the service reads slot counts, or derives them from source counts."""
    counted = tuple(
        name
        for name in ("moe_load", "source_load")
        if all(getattr(layer, name) is not None for layer in layers)
    )
    if not counted:
        raise ValueError("no heat is counted: all layers need moe_load, or all of them source_load")
    return counted


def _check_alike(facts: Sequence[_Facts]) -> None:
    if not facts[0].slots_LS.shape[0]:
        raise RendezvousError("there are no MoE layers to balance")
    for rank, fact in enumerate(facts):
        if fact.complaint is not None:
            raise RendezvousError(f"rank {rank}: {fact.complaint}")
    _check_token_groups(facts)
    for rank, fact in enumerate(facts):
        for what in (
            "experts",
            "shares_tokens",
            "rank_bound",
            "counts",
            "bytes_per_expert",
            "width",
            "transfer_backend",
            "shared_settings",
        ):
            here, there = getattr(facts[0], what), getattr(fact, what)
            if here != there:
                raise RendezvousError(f"{what} differ: rank 0 has {here}, rank {rank} has {there}")
        if fact.slots_LS.shape != facts[0].slots_LS.shape:
            raise RendezvousError(
                f"[layers, slots] differ: rank 0 has {list(facts[0].slots_LS.shape)}, "
                f"rank {rank} has {list(fact.slots_LS.shape)}"
            )
        for layer, (here, there) in enumerate(
            zip(facts[0].weights_by_layer, fact.weights_by_layer, strict=True)
        ):
            if here != there:
                raise RendezvousError(
                    f"expert weights of layer {layer} differ: rank 0 has {here}, rank {rank} has {there}"
                )


def _check_token_groups(facts: Sequence[_Facts]) -> None:
    """Ranks whose dispatch shares tokens must say with whom, or the service would give them different tables."""
    members = Counter(fact.token_group for fact in facts)
    for rank, fact in enumerate(facts):
        if fact.shares_tokens and len(facts) > 1 and members[fact.token_group] == 1:
            raise RendezvousError(
                f"rank {rank}: its layers share tokens between ranks (all-gather dispatch), but it is alone in its "
                "token group; start the agent with token_group, a number equal on all ranks that see the same tokens"
            )
