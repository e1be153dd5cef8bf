"""Rendezvous of the agents of an EP group.

Each rank sends its facts to all others. If the facts are incompatible, every rank raises the same error.
"""

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
from worker_agent.live_layer import (
    ExpertWeights,
    Gathering,
    LiveLayer,
    Named,
    RankBound,
    RowDealt,
    SplitByStep,
)
from worker_agent.settings import AgentSettings
from worker_agent.swap.fingerprint import differing_replicas, expert_fingerprints, shared_memory
from worker_agent.swap.group import AgentGroup, RendezvousError, agree
from worker_agent.swap.lane import Lanes, choose_backend
from worker_agent.swap.rank_layout import Identity, RankLayout

_log = logging.getLogger("eplb.agent")


@dataclass(frozen=True)
class Rendezvous:
    """Result of a rendezvous.

    Parameters
    ----------
    group
        The agents' group.
    votes
        Process group for votes.
    lanes
        Lanes for transfers; lane 0 is open.
    identity
        This rank's identity within the deployment.
    installed
        This rank's initial layout.
    """

    group: AgentGroup
    votes: dist.ProcessGroup
    lanes: Lanes
    identity: Identity
    installed: RankLayout


@dataclass(frozen=True)
class _Facts:
    """Facts that one rank sends to all others.

    They are pickled, and a rank may run a different release of the agent, so do not rename fields.

    Parameters
    ----------
    nonce
        Random id. Rank 0's nonce becomes the group id.
    release
        The agent's version.
    token_group
        Token group of the rank.
    slots_LS
        Logical expert of each local slot, int32 ``[L, S]``.
    shape
        Deployment shape as seen by this rank.
    shares_tokens
        True if several ranks see the same tokens in any layer's dispatch.
    gathers_all
        True if any layer's dispatch gathers the tokens of all ranks.
    fingerprints_LS
        Fingerprints of the local experts, uint32 ``[L, S]``.
    alike
        Facts that must be equal on all ranks, keyed by name.
    """

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
    """Form a group from the ranks of ``host_group``, and agree on their initial layout. This is a collective.

    Parameters
    ----------
    layers
        The live layers, in the same order on every rank.
    host_group
        The engine's CPU-capable process group.
    settings
        The agent's settings.
    token_group
        ID of this rank's token group. Ranks that see the same tokens have the same ID. ``None`` if no other rank sees
        this rank's tokens.

    Raises
    ------
    RendezvousError
        On every rank, if shapes, settings or placements are incompatible, or if any rank cannot be reached.
    """
    rank = dist.get_rank(host_group)
    ranks = dist.get_world_size(host_group)
    facts_or_error: _Facts | str
    try:
        facts_or_error = _gather_facts(layers, settings, rank if token_group is None else token_group, ranks)
    except Exception as error:
        # Send any error to the other ranks, because they would otherwise wait for this rank's facts.
        facts_or_error = str(error)
    group, received = AgentGroup.join(
        host_group, settings.node, settings.data_host, facts_or_error, settings.peer_timeout_seconds
    )
    facts = _check_facts(received)
    mixed = mixed_releases({rank: fact.release for rank, fact in enumerate(facts)})
    if mixed is not None:
        _log.warning("rank %d: %s", rank, mixed)
    layout = _agree_on_layout(host_group, rank, _placement_of(facts), layers)
    timeout = timedelta(seconds=settings.transfer_timeout_seconds)
    lanes = Lanes(group, facts[rank].alike["transfer_backend"], _device(layers), timeout)
    votes = _open_links(host_group, group, lanes)
    identity = Identity(
        deployment=settings.deployment,
        group_id=facts[0].nonce,
        rank=rank,
        node=settings.node,
        token_groups=tuple(fact.token_group for fact in facts),
        shape=facts[rank].shape,
        device=device_name(_device(layers)),
    )
    return Rendezvous(group, votes, lanes, identity, layout)


def _placement_of(facts: Sequence[_Facts]) -> Placement:
    """Return the placement formed by the slots of all ranks.

    Raises ``RendezvousError`` if the placement is invalid, or if replicas of an expert differ.
    """
    try:
        slots_LRS = np.stack([fact.slots_LS for fact in facts], axis=1)
        placement = Placement(slots_LRS, facts[0].shape.experts)
    except PlacementError as error:
        raise RendezvousError(f"the experts of all ranks do not form a valid placement: {error}") from error
    difference = differing_replicas(slots_LRS, [fact.fingerprints_LS for fact in facts])
    if difference is not None:
        raise RendezvousError(difference)
    return placement


def _agree_on_layout(
    host_group: dist.ProcessGroup, rank: int, placement: Placement, layers: Sequence[LiveLayer]
) -> RankLayout:
    """Return this rank's initial layout. This is a collective.

    Raises ``RendezvousError`` on every rank if any rank's tables do not match the placement.
    """
    layout = None
    complaint = None
    try:
        tables_LE = np.stack([_table(layer) for layer in layers])
        layout = RankLayout.first(rank, placement, tables_LE)
    except PlacementError as error:
        complaint = str(error)
    agree(host_group, complaint)
    assert layout is not None
    return layout


def _open_links(host_group: dist.ProcessGroup, group: AgentGroup, lanes: Lanes) -> dist.ProcessGroup:
    """Open lane 0 and the process group for votes, and return the latter. This is a collective.

    Raises ``RendezvousError`` on every rank if any rank cannot open them.
    """
    votes = None
    complaint = None
    try:
        votes = group.process_group("vote")
        lanes.open_first()
    except RuntimeError as error:
        complaint = f"cannot reach the other ranks: {error}"
    agree(host_group, complaint)
    assert votes is not None
    return votes


def _gather_facts(
    layers: Sequence[LiveLayer], settings: AgentSettings, token_group: int, ranks: int
) -> _Facts:
    """Return this rank's facts. Raises ``ValueError`` if its layers cannot be balanced.

    Parameters
    ----------
    layers
        The live layers.
    settings
        The agent's settings.
    token_group
        Token group of this rank.
    ranks
        Number of ranks.
    """
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
        splits_by_step=any(isinstance(layer, SplitByStep) and layer.splits_by_step for layer in layers),
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
        fingerprints_LS=np.stack([expert_fingerprints(layer_weights) for layer_weights in weights.values()]),
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
    """Return the device of this rank's experts, which is the same for all layers."""
    return layers[0].expert_weights()[0][0].device


def _local_slots(index: int, layer: LiveLayer) -> Int32:
    """Return the logical expert of each local slot, int32 ``[S]``, from the layer's ``expert_map``.

    Raises ``ValueError`` if the layer's tensors do not match its number of slots.

    Parameters
    ----------
    index
        Index of the layer, for error messages.
    layer
        The layer.
    """
    local_E = layer.expert_map.cpu().numpy()
    slots = len(layer.expert_weights()[0])
    experts = np.flatnonzero(local_E >= 0)
    if sorted(local_E[experts].tolist()) != list(range(slots)):
        raise ValueError(
            f"layer {index}: expert_map must assign one expert to each of the {slots} slots, but it assigns "
            f"{experts.size} experts to the slots {sorted(set(local_E[experts].tolist()))}"
        )
    if layer.moe_load is not None and layer.moe_load.shape[1] != slots:
        raise ValueError(
            f"layer {index}: moe_load counts {layer.moe_load.shape[1]} slots, but the layer has {slots}"
        )
    for weight in layer.expert_weights():
        _check_weight(index, weight, slots)
    slots_S = np.zeros(slots, dtype=np.int32)
    slots_S[local_E[experts]] = experts
    return slots_S


def _table(layer: LiveLayer) -> Int32:
    """Return a host copy of a layer's ``log2phy``, int32 ``[E]``, or ``[E, D]`` for a dealing table."""
    table = layer.log2phy.cpu().numpy().astype(np.int32)
    return without_single_entries(table) if table.ndim == 2 else table


def _dealing_width(layers: Sequence[LiveLayer], experts: int) -> int:
    """Return the number of entries per expert in ``log2phy``, which is 1 unless it is a dealing table.

    Raises ``ValueError`` if layers differ, or if their tables do not match the number of experts.
    """
    shapes = {_table(layer).shape for layer in layers}
    if len(shapes) != 1:
        raise ValueError(f"log2phy must have the same shape in all layers, got {sorted(shapes)}")
    shape = shapes.pop()
    width = int(shape[1]) if len(shape) == 2 else 1
    if shape[:1] != (experts,) or len(shape) > 2 or not 1 <= width <= MAX_ENTRIES:
        raise ValueError(
            f"log2phy must have shape [{experts}], or [{experts}, entries] with at most {MAX_ENTRIES} entries; "
            f"got {list(shape)}"
        )
    return width


def _check_weight(index: int, weight: ExpertWeights, slots: int) -> None:
    """Raise ``ValueError`` unless a weight has one contiguous tensor per slot.

    Parameters
    ----------
    index
        Index of the layer, for error messages.
    weight
        One kind of weight for all local slots.
    slots
        Number of local slots.
    """
    if isinstance(weight, torch.Tensor):
        if weight.shape[0] != slots or not weight.is_contiguous():
            raise ValueError(
                f"layer {index}: expert weights must be contiguous, with the {slots} slots as the first dimension; "
                f"got shape {list(weight.shape)}, strides {list(weight.stride())}"
            )
        return
    kinds = {(expert.dtype, tuple(expert.shape), expert.is_contiguous()) for expert in weight}
    if len(weight) != slots or len(kinds) != 1 or not weight[0].is_contiguous():
        raise ValueError(
            f"layer {index}: a list of expert weights must have {slots} contiguous tensors of equal shape and dtype, "
            f"got {len(weight)} of {sorted(map(str, kinds))}"
        )


def _counts(layers: Sequence[LiveLayer]) -> tuple[str, ...]:
    """Return the names of the kinds of token counts that all layers provide.

    One kind is enough, because the service can derive slot counts from the source heat. Raises ``ValueError`` if no
    kind is provided by all layers.
    """
    names = ("moe_load", "source_load")
    available = tuple(name for name in names if all(getattr(layer, name) is not None for layer in layers))
    if not available:
        raise ValueError(
            "the layers count no heat: provide moe_load in all layers, or source_load in all layers"
        )
    return available


def _check_facts(received: Sequence[_Facts | str]) -> list[_Facts]:
    """Return the facts of all ranks, in rank order.

    Raises ``RendezvousError`` if a rank sent an error, or facts that are incompatible with the other ranks.
    """
    facts = []
    for rank, fact_or_error in enumerate(received):
        if isinstance(fact_or_error, str):
            raise RendezvousError(f"rank {rank}: {fact_or_error}")
        facts.append(fact_or_error)
    members = Counter(fact.token_group for fact in facts)
    for rank, fact in enumerate(facts):
        # Without a token group, the service would give different tables to ranks that see the same tokens.
        if fact.shares_tokens and len(facts) > 1 and members[fact.token_group] == 1:
            raise RendezvousError(
                f"rank {rank}: its layers share tokens between ranks (all-gather dispatch), but its token group has no "
                "other rank; start the agent with a token_group that is the same on all ranks that see the same tokens"
            )
        if fact.gathers_all and len(members) > 1:
            raise RendezvousError(
                f"rank {rank}: its layers gather the tokens of all ranks, but the ranks are in the token groups "
                f"{sorted(members)}; start all agents with the same token_group"
            )
    for rank, fact in enumerate(facts):
        for name, expected in facts[0].alike.items():
            actual = fact.alike.get(name, "none")
            if actual != expected:
                raise RendezvousError(f"{name} differ: rank 0 has {expected}, rank {rank} has {actual}")
    return facts
