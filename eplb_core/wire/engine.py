"""Decisions that a service makes for a group whose engine moves the weights itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Int32
from eplb_core.wire import fields
from eplb_core.wire.agent import check_protocol
from eplb_core.wire.codec import PROTOCOL_VERSION, decode, packed, unpack
from eplb_core.wire.fields import WireError, check_count
from eplb_core.wire.generated import agent_pb2

MAX_PARTS = 1024
"""Maximum number of parts in a window."""


@dataclass(frozen=True)
class DecideRequest:
    """Heat and placement of an engine.

    Parameters
    ----------
    deployment
        Name of the deployment.
    ranks
        R, number of ranks.
    nodes
        Number of nodes; each contains the same number of consecutive ranks.
    experts
        E, logical experts per layer.
    heat_NLE
        int32 ``[N, L, E]``, tokens per part of the window, oldest part first.
    phy2log_LP
        int32 ``[L, P]``, logical expert in each slot, sorted by rank.
    split
        The engine's split of an expert's tokens over its replicas.
    sum_only
        True if the heat is only the sum over the window, not split into parts.
    """

    MESSAGE: ClassVar[type[Any]] = agent_pb2.DecideRequest
    protocol_version: ClassVar[int] = PROTOCOL_VERSION

    deployment: fields.Deployment
    ranks: Annotated[int, fields.below(fields.MAX_RANKS + 1, least=1)]
    nodes: Annotated[int, fields.below(fields.MAX_RANKS + 1, least=1)]
    experts: Annotated[int, fields.below(fields.MAX_EXPERTS + 1, least=1)]
    heat_NLE: Annotated[Int32, packed(None, "layers", "experts")]
    phy2log_LP: Annotated[Int32, "physical_to_logical", packed("layers", None)]
    split: fields.Name
    sum_only: bool = False

    def check(self, field: str) -> None:
        """Raise ``WireError`` unless heat and placement are consistent and small enough to solve."""
        parts, layers, experts = self.heat_NLE.shape
        check_count(parts, f"the number of parts in {field}.heat", MAX_PARTS + 1, least=1)
        check_count(layers, f"the number of layers in {field}.heat", fields.MAX_LAYERS + 1, least=1)
        if self.heat_NLE.min() < 0:
            raise WireError(f"{field}.heat: a count is negative")
        physical = self.phy2log_LP.shape[1]
        if physical % self.ranks or not 1 <= physical // self.ranks <= fields.MAX_SLOTS:
            raise WireError(
                f"{field}.physical_to_logical has {physical} slots; expected the same number on each of {self.ranks} "
                f"ranks, from 1 to {fields.MAX_SLOTS}"
            )
        if layers * max(experts, self.ranks) > fields.MAX_LAYER_ENTRIES:
            raise WireError(
                f"{field}: {layers} layers x {experts} experts on {self.ranks} ranks are too large; the limit for "
                f"layers x experts and layers x ranks is {fields.MAX_LAYER_ENTRIES}"
            )


def decode_decide_request(message: agent_pb2.DecideRequest) -> DecideRequest:
    """Decode a request; raises ``ProtocolVersionError`` or ``WireError``, which names the invalid field."""
    check_protocol(message.protocol_version, "the agent")
    shape = message.heat.shape
    sizes = {
        "layers": shape[1] if len(shape) == 3 else 0,
        "experts": message.experts,
    }
    return decode(DecideRequest, message, sizes)


def decode_decision(message: agent_pb2.DecideResponse, old_LP: npt.NDArray[np.int64], experts: int) -> Int32:
    """Decode a service's placement, int32 ``[L, P]``.

    Parameters
    ----------
    message
        The service's response.
    old_LP
        Current placement.
    experts
        E, logical experts per layer.

    Raises
    ------
    WireError
        If the placement differs in shape from the current one, or does not serve every expert.
    """
    name = "the service's placement"
    new_LP = unpack(message.physical_to_logical, list(old_LP.shape), name)
    for layer, slots_P in enumerate(new_LP):
        if slots_P.min() < 0 or slots_P.max() >= experts:
            raise WireError(f"{name}: layer {layer} has an expert that does not exist")
        if np.unique(slots_P).size != experts:
            raise WireError(f"{name}: layer {layer} does not serve every expert")
    return new_LP
