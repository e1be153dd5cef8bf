"""Rendezvous of the agents of an EP group: each sends all that it holds, and all alike refuse what does not fit."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_core import __version__
from eplb_core.placement import MAX_ENTRIES, Int32, Placement, PlacementError, without_single_entries
from eplb_core.wire.agent import Shape, mixed_releases
from eplb_core.wire.codec import PROTOCOL_VERSION
from worker_agent.device import device_name
from worker_agent.live_layer import ExpertWeights, Gathering, LiveLayer, Named, RankBound, RowDealt
from worker_agent.settings import AgentSettings
from worker_agent.swap.fingerprint import differing_replicas, expert_fingerprints, shared_memory
from worker_agent.swap.group import AgentGroup, RendezvousError, agree
from worker_agent.swap.lane import Lanes, choose_backend
from worker_agent.swap.rank_layout import Identity, RankLayout

_log = logging.getLogger("eplb.agent")


@dataclass(frozen=True)
class Rendezvous:
    """Result of a meeting: the agents' group, its votes and lanes, who this rank is, and what is installed."""

    group: AgentGroup
    votes: dist.ProcessGroup
    lanes: Lanes
    identity: Identity
    installed: RankLayout


@dataclass(frozen=True)
class _Facts:
    """Facts that one rank sends to the others; ``alike`` are by name those that all ranks must share."""

    nonce: str
    release: str
    token_group: int
    slots_LS: Int32
    shape: Shape
    shares_tokens: bool
    gathers_all: bool
    fingerprints_LS: npt.NDArray[np.uint32]
    alike: dict[str, Any]


def meet(
    layers: Sequence[LiveLayer],
    host_group: dist.ProcessGroup,
    settings: AgentSettings,
    token_group: int | None,
) -> Rendezvous:
    """Join the ranks of ``host_group`` and agree on who is who and what is installed. A collective.

    ``host_group`` is CPU-capable; the live ``layers`` are the same ones in the same order on every rank; a
    ``token_group`` is equal on all ranks that see the same tokens, ``None`` where this rank's are its own. Raises
    ``RendezvousError`` on every rank, where shapes, settings or placements do not fit or a rank is out of reach.
    """
    rank, ranks = dist.get_rank(host_group), dist.get_world_size(host_group)
    own: _Facts | str
    try:
        own = _facts(layers, settings, rank if token_group is None else token_group, ranks)
    except Exception as error:
        # Whatever is wrong with this rank's layers, the others must hear of it rather than wait.
        own = str(error)
    group, sent = AgentGroup.join(
        host_group, settings.node, settings.data_host, own, settings.peer_timeout_seconds
    )
    facts = _checked_alike(sent)
    mixed = mixed_releases({rank: fact.release for rank, fact in enumerate(facts)})
    if mixed is not None:
        _log.warning("rank %d: %s", rank, mixed)
    try:
        slots_LRS = np.stack([fact.slots_LS for fact in facts], axis=1)
        placement = Placement(slots_LRS, facts[rank].shape.experts)
    except PlacementError as error:
        raise RendezvousError(f"the ranks do not hold a placement: {error}") from error
    differing = differing_replicas(slots_LRS, [fact.fingerprints_LS for fact in facts])
    if differing is not None:
        raise RendezvousError(differing)
    complaint = None
    try:
        tables_LE = np.stack([_table(layer) for layer in layers])
        installed = RankLayout.first(rank, placement, tables_LE)
    except PlacementError as error:
        complaint = str(error)
    agree(host_group, complaint)
    timeout = timedelta(seconds=settings.transfer_timeout_seconds)
    lanes = Lanes(group, facts[rank].alike["transfer_backend"], _device(layers), timeout)
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
        node=settings.node,
        token_groups=tuple(fact.token_group for fact in facts),
        shape=facts[rank].shape,
        device=device_name(_device(layers)),
    )
    return Rendezvous(group, votes, lanes, identity, installed)


def _facts(layers: Sequence[LiveLayer], settings: AgentSettings, token_group: int, ranks: int) -> _Facts:
    """Gather this rank's facts; raises where its layers cannot be balanced."""
    if not layers:
        raise ValueError("there are no MoE layers to balance")
    slots_LS = np.stack([_local_slots(index, layer) for index, layer in enumerate(layers)])
    experts = int(layers[0].expert_map.shape[0])
    shape = Shape(
        ranks,
        len(layers),
        experts,
        slots_LS.shape[1],
        bytes_per_expert=sum(weight[0].nbytes for weight in layers[0].expert_weights()),
        width=_dealing_width(layers, experts),
        rank_bound=any(isinstance(layer, RankBound) and layer.rank_bound for layer in layers),
        entry_by_row=any(isinstance(layer, RowDealt) and layer.entry_by_row for layer in layers),
    )
    weights = {f"layer {index}": layer.expert_weights() for index, layer in enumerate(layers)}
    shared = shared_memory(weights)
    if shared is not None:
        raise ValueError(shared)
    shares_tokens = any(layer.shares_tokens for layer in layers)
    kinds = {
        f"expert weights of layer {index}": [
            (str(weight[0].dtype), list(weight[0].shape)) for weight in layer.expert_weights()
        ]
        for index, layer in enumerate(layers)
    }
    return _Facts(
        nonce=uuid.uuid4().hex,
        release=__version__,
        token_group=token_group,
        slots_LS=slots_LS,
        shape=shape,
        shares_tokens=shares_tokens,
        gathers_all=any(isinstance(layer, Gathering) and layer.gathers_all for layer in layers),
        fingerprints_LS=np.stack([expert_fingerprints(parts) for parts in weights.values()]),
        alike={
            "protocol version": PROTOCOL_VERSION,
            **asdict(shape),
            "shares_tokens": shares_tokens,
            "names of layers": [layer.name if isinstance(layer, Named) else "" for layer in layers],
            "counts": _counts(layers),
            "transfer_backend": choose_backend(settings.transfer_backend, _device(layers).type),
            "settings": settings.shared(),
            **kinds,
        },
    )


def _device(layers: Sequence[LiveLayer]) -> torch.device:
    """Device of the experts; all of a rank's are on one."""
    return layers[0].expert_weights()[0][0].device


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
    """Table of a layer on the host, int32 ``[E]``, or ``[E, D]`` of more than one entry."""
    table = layer.log2phy.cpu().numpy().astype(np.int32)
    return without_single_entries(table) if table.ndim == 2 else table


def _dealing_width(layers: Sequence[LiveLayer], experts: int) -> int:
    """Number of entries of the dealing tables, which all layers have alike."""
    shapes = {_table(layer).shape for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"all layers deal alike, got log2phy of the shapes {sorted(shapes)}")
    shape = shapes.pop()
    width = int(shape[1]) if len(shape) == 2 else 1
    if shape[:1] != (experts,) or len(shape) > 2 or not 1 <= width <= MAX_ENTRIES:
        raise ValueError(
            f"log2phy has the shape [{experts}], or [{experts}, entries] with at most {MAX_ENTRIES}; "
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
    """Names of what all of a rank's layers count: the service reads slot counts, or derives them."""
    names = ("moe_load", "source_load")
    counted = tuple(name for name in names if all(getattr(layer, name) is not None for layer in layers))
    if not counted:
        raise ValueError("no heat is counted: all layers need moe_load, or all of them source_load")
    return counted


def _checked_alike(sent: Sequence[_Facts | str]) -> list[_Facts]:
    """Raise ``RendezvousError`` where a rank complains, or differs from rank 0."""
    facts = []
    for rank, theirs in enumerate(sent):
        if isinstance(theirs, str):
            raise RendezvousError(f"rank {rank}: {theirs}")
        facts.append(theirs)
    members = Counter(fact.token_group for fact in facts)
    for rank, fact in enumerate(facts):
        # Ranks that share tokens must say with whom, or the service would give them different tables.
        if fact.shares_tokens and len(facts) > 1 and members[fact.token_group] == 1:
            raise RendezvousError(
                f"rank {rank}: its layers share tokens between ranks (all-gather dispatch), but it is alone in its "
                "token group; start the agent with token_group, a number equal on all ranks that see the same tokens"
            )
        if fact.gathers_all and len(members) > 1:
            raise RendezvousError(
                f"rank {rank}: its layers gather the tokens of all ranks, but these are in the token groups "
                f"{sorted(members)}; start all agents with the same token_group"
            )
    for rank, fact in enumerate(facts):
        for name, here in facts[0].alike.items():
            if here != (there := fact.alike.get(name, "none")):
                raise RendezvousError(f"{name} differ: rank 0 has {here}, rank {rank} has {there}")
    return facts
