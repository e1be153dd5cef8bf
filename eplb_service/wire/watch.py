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
    """

    shape: Shape
    nodes_R: tuple[int, ...]
    placement: Placement
    layer_epochs: tuple[int, ...]
    pending_steps: int


@dataclass(frozen=True)
class SwitchedLayer:
    """``layer`` holds the experts ``phy2log_RS``, int32 ``[R, S]``, since ``epoch``."""

    layer: int
    epoch: int
    phy2log_RS: Int32


def encode_served(served: ServedModel) -> operator_pb2.ServedModel:
    """The message."""
    return operator_pb2.ServedModel(
        shape=encode_shape(served.shape),
        ranks=served.shape.ranks,
        nodes=served.nodes_R,
        physical_to_logical=pack(served.placement.phy2log_LRS),
        layer_epochs=served.layer_epochs,
        pending_steps=served.pending_steps,
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
    )


def encode_switched(switched: SwitchedLayer) -> operator_pb2.SwitchedLayer:
    """The message."""
    return operator_pb2.SwitchedLayer(
        layer=switched.layer, epoch=switched.epoch, physical_to_logical=pack(switched.phy2log_RS)
    )


def decode_switched(message: operator_pb2.SwitchedLayer, shape: Shape) -> SwitchedLayer:
    """A switched layer of a deployment of ``shape``; raises ``WireError`` naming the field that does not fit it."""
    phy2log_RS = unpack(
        message.physical_to_logical, (shape.ranks, shape.slots), "switched.physical_to_logical"
    )
    try:
        Placement(phy2log_RS[None], shape.experts)
    except PlacementError as error:
        raise WireError(f"switched.physical_to_logical: {error}") from error
    return SwitchedLayer(
        check_count(message.layer, "switched.layer", shape.layers),
        check_count(message.epoch, "switched.epoch", LAST_VERSION),
        phy2log_RS,
    )
