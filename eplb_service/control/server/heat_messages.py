"""What is served and counted, as those hear it who watch a deployment's heat; written here and read here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.server.hello import LAST_EPOCH, MOST_RANKS, Shape, read_shape
from eplb_service.placement import Int32, Placement, PlacementError
from eplb_service.planner.topology import Topology
from eplb_service.wire.codec import WireError, pack, unpack
from eplb_service.wire.generated import agent_pb2, operator_pb2

_MOST_PENDING_STEPS = 1 << 20


@dataclass(frozen=True)
class Served:
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


def served_message(
    live: LivePlacement, shape: Shape, topology: Topology, pending_steps: int
) -> operator_pb2.ServedModel:
    """All that ``Served`` holds."""
    return operator_pb2.ServedModel(
        shape=agent_pb2.ModelShape(
            layers=shape.layers,
            experts=shape.experts,
            slots=shape.slots,
            bytes_per_expert=shape.bytes_per_expert,
        ),
        ranks=shape.ranks,
        nodes=topology.nodes_R.tolist(),
        physical_to_logical=pack(live.placement.phy2log_LRS),
        layer_epochs=live.layer_epochs,
        pending_steps=pending_steps,
    )


def read_served(message: operator_pb2.ServedModel) -> Served:
    """The other way; raises ``WireError`` or ``RefusedError`` where the message contradicts itself."""
    shape = read_shape(message.ranks, message.shape)
    size = (shape.layers, shape.ranks, shape.slots)
    try:
        placement = Placement(unpack(message.physical_to_logical, size, "served.placement"), shape.experts)
    except PlacementError as error:
        raise WireError(f"served.placement: {error}") from error
    if len(message.layer_epochs) != shape.layers or max(message.layer_epochs) >= LAST_EPOCH:
        raise WireError(f"served.layer_epochs: expected one for each of {shape.layers} layers")
    if len(message.nodes) != shape.ranks or max(message.nodes) >= MOST_RANKS:
        raise WireError(f"served.nodes: expected one for each of {shape.ranks} ranks")
    if not 1 <= message.pending_steps <= _MOST_PENDING_STEPS:
        raise WireError(
            f"served.pending_steps is {message.pending_steps}; at most {_MOST_PENDING_STEPS} are taken"
        )
    return Served(shape, tuple(message.nodes), placement, tuple(message.layer_epochs), message.pending_steps)


def switched_message(layer: int, epoch: int, phy2log_RS: Int32) -> operator_pb2.SwitchedLayer:
    """A layer has switched."""
    return operator_pb2.SwitchedLayer(layer=layer, epoch=epoch, physical_to_logical=pack(phy2log_RS))


def read_switched(message: operator_pb2.SwitchedLayer, served: Served) -> tuple[int, int, Int32]:
    """Layer, epoch and slots ``[R, S]``; raises ``WireError`` where they do not fit what is served."""
    shape = served.shape
    if message.layer >= shape.layers or message.epoch >= LAST_EPOCH:
        raise WireError(
            f"switched: layer {message.layer} at epoch {message.epoch} is none of {shape.layers} layers"
        )
    phy2log_RS = unpack(message.physical_to_logical, (shape.ranks, shape.slots), "switched.placement")
    try:
        Placement(phy2log_RS[None], shape.experts)
    except PlacementError as error:
        raise WireError(f"switched.placement: {error}") from error
    return message.layer, message.epoch, np.ascontiguousarray(phy2log_RS)
