"""What watchers of a deployment's heat receive beside its heat reports: what is served, and each switch."""

from __future__ import annotations

from dataclasses import dataclass

from eplb_service.placement import Int32, Placement, PlacementError
from eplb_service.wire.codec import pack, unpack
from eplb_service.wire.fields import LAST_VERSION, MOST_RANKS, WireError, check_count, check_epochs
from eplb_service.wire.generated import operator_pb2
from eplb_service.wire.hello import Shape, decode_shape, encode_shape

MOST_PENDING_STEPS = 1 << 20
"""Steps that one rank may be ahead of another."""
MOST_WATCHED_ENTRIES = 1 << 23
"""Entries of all ranks' tables that watchers are sent; beyond, a message would be too large."""


@dataclass(frozen=True)
class ServedModel:
    """What a deployment serves.

    Parameters
    ----------
    shape
        Its sizes.
    nodes_R
        Node of each rank, numbered from 0.
    placement, layer_epochs
        Experts of all slots, and the epoch at which each layer last changed.
    pending_steps
        Steps that the fastest rank may be ahead of the slowest; also the most steps of one report.
    log2phy_RLE
        Tables of all source ranks, int32 ``[R, L, E]``, or ``[R, L, E, D]`` where they deal; ``None`` where there are
        more than ``MOST_WATCHED_ENTRIES``, or the service is one that does not send them.
    """

    shape: Shape
    nodes_R: tuple[int, ...]
    placement: Placement
    layer_epochs: tuple[int, ...]
    pending_steps: int
    log2phy_RLE: Int32 | None = None


@dataclass(frozen=True)
class SwitchedLayer:
    """``layer`` holds the experts ``phy2log_RS``, int32 ``[R, S]``, since ``epoch``.

    ``log2phy_RE`` are its tables, int32 ``[R, E]`` or ``[R, E, D]``; ``None`` from a service that does not send them.
    """

    layer: int
    epoch: int
    phy2log_RS: Int32
    log2phy_RE: Int32 | None = None


def encode_served(served: ServedModel) -> operator_pb2.ServedModel:
    """The message."""
    return operator_pb2.ServedModel(
        shape=encode_shape(served.shape),
        ranks=served.shape.ranks,
        nodes=served.nodes_R,
        physical_to_logical=pack(served.placement.phy2log_LRS),
        layer_epochs=served.layer_epochs,
        pending_steps=served.pending_steps,
        log2phy=None
        if served.log2phy_RLE is None or served.log2phy_RLE.size > MOST_WATCHED_ENTRIES
        else pack(served.log2phy_RLE),
    )


def decode_served(message: operator_pb2.ServedModel) -> ServedModel:
    """What is served; raises ``WireError`` naming the field that cannot be what it is."""
    ranks = check_count(message.ranks, "served.ranks", MOST_RANKS + 1, least=1)
    shape = decode_shape(ranks, message.shape, "served")
    size = (shape.layers, shape.ranks, shape.slots)
    try:
        placement = Placement(
            unpack(message.physical_to_logical, size, "served.physical_to_logical"), shape.experts
        )
    except PlacementError as error:
        raise WireError(f"served.physical_to_logical: {error}") from error
    if len(message.nodes) != shape.ranks or max(message.nodes) >= MOST_RANKS:
        raise WireError(f"served.nodes: expected one below {MOST_RANKS} for each of {shape.ranks} ranks")
    return ServedModel(
        shape,
        tuple(message.nodes),
        placement,
        check_epochs(message.layer_epochs, shape.layers, "served.layer_epochs"),
        check_count(message.pending_steps, "served.pending_steps", MOST_PENDING_STEPS + 1, least=1),
        _tables_of(message, placement, shape),
    )


def _tables_of(message: operator_pb2.ServedModel, placement: Placement, shape: Shape) -> Int32 | None:
    if not message.HasField("log2phy"):
        return None
    sent = unpack(message.log2phy, (shape.ranks, shape.layers, *shape.table), "served.log2phy")
    return _checked(sent, placement, "served.log2phy")


def encode_switched(switched: SwitchedLayer) -> operator_pb2.SwitchedLayer:
    """The message."""
    return operator_pb2.SwitchedLayer(
        layer=switched.layer,
        epoch=switched.epoch,
        physical_to_logical=pack(switched.phy2log_RS),
        log2phy=None if switched.log2phy_RE is None else pack(switched.log2phy_RE),
    )


def decode_switched(message: operator_pb2.SwitchedLayer, shape: Shape) -> SwitchedLayer:
    """A switched layer of a deployment of ``shape``; raises ``WireError`` naming the field that does not fit it."""
    phy2log_RS = unpack(
        message.physical_to_logical, (shape.ranks, shape.slots), "switched.physical_to_logical"
    )
    try:
        placement = Placement(phy2log_RS[None], shape.experts)
    except PlacementError as error:
        raise WireError(f"switched.physical_to_logical: {error}") from error
    log2phy_RE = None
    if message.HasField("log2phy"):
        field = "switched.log2phy"
        sent = unpack(message.log2phy, (shape.ranks, *shape.table), field)
        log2phy_RE = _checked(sent[:, None], placement, field)[:, 0]
    return SwitchedLayer(
        check_count(message.layer, "switched.layer", shape.layers),
        check_count(message.epoch, "switched.epoch", LAST_VERSION),
        phy2log_RS,
        log2phy_RE,
    )


def _checked(log2phy_RLE: Int32, placement: Placement, field: str) -> Int32:
    """The tables, every entry of which names a slot that holds its expert."""
    try:
        placement.check_log2phy(log2phy_RLE)
    except PlacementError as error:
        raise WireError(f"{field}: {error}") from error
    return log2phy_RLE
