"""A rank's introduction, with every bound checked before its arrays are opened."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eplb_service.control.server.refusal import contradicts, invalid
from eplb_service.placement import Int32, PlacementError, check_shape
from eplb_service.wire.codec import PROTOCOL_VERSION, unpack
from eplb_service.wire.generated import agent_pb2

MOST_LAYERS = 512
MOST_EXPERTS = 4096
MOST_RANKS = 4096
MOST_SLOTS = 512
MOST_TABLE_ENTRIES = 1 << 25
"""Bound on ranks x layers x experts: 320 ranks of DeepSeek-V3 have 4.8 million."""
MOST_LAYER_ENTRIES = 1 << 18
"""Bound on layers x experts and on layers x ranks, both kept for every step of a window."""
LAST_EPOCH = 1 << 62
LONGEST_TEXT = 256

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Shape:
    """Sizes that all ranks of a deployment share; ``bytes_per_expert`` is of one expert of one layer."""

    ranks: int
    layers: int
    experts: int
    slots: int
    bytes_per_expert: int


@dataclass(frozen=True)
class RankHello:
    """Who a rank is and what it serves.

    Parameters
    ----------
    token_group
        Ranks that name the same group see the same tokens.
    group_id
        Drawn once per forming of the EP group.
    epoch, digest, layer_epochs
        Version of the placement that the rank serves.
    slots_LS
        Logical expert in each of its slots, int32 ``[L, S]``.
    log2phy_LE
        Its table, int32 ``[L, E]``.
    agent_version
        Release of the agent.
    """

    deployment: str
    rank: int
    node: str
    token_group: int
    group_id: str
    shape: Shape
    epoch: int
    digest: int
    layer_epochs: tuple[int, ...]
    slots_LS: Int32
    log2phy_LE: Int32
    agent_version: str = ""

    @property
    def version(self) -> tuple[int, int]:
        """Epoch and digest."""
        return self.epoch, self.digest


def read_hello(message: agent_pb2.Hello) -> RankHello:
    """Check a Hello on its own.

    Raises ``RefusedError`` where version, name, sizes or rank cannot be, and ``WireError`` where an array is malformed.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise contradicts(
            f"the agent speaks protocol version {message.protocol_version}, this service {PROTOCOL_VERSION}; "
            "install the same release on both sides"
        )
    shape = read_shape(message.ep_size, message.shape)
    _check_texts(message)
    if message.rank >= shape.ranks:
        raise invalid(f"hello.rank is {message.rank}, but ep_size is {shape.ranks}; ranks count from 0")
    if message.token_group >= MOST_RANKS:
        raise invalid(f"hello.token_group is {message.token_group}; it must be below {MOST_RANKS}")
    state = message.placement
    if len(state.layer_epochs) != shape.layers:
        raise invalid(
            f"hello.layer_epochs: expected one for each of {shape.layers} layers, got {len(state.layer_epochs)}"
        )
    if state.epoch >= LAST_EPOCH:
        raise invalid(f"hello.epoch is {state.epoch}; it must be below {LAST_EPOCH}")
    if max(state.layer_epochs) > state.epoch:
        raise invalid(
            f"hello.layer_epochs: a layer changed at epoch {max(state.layer_epochs)}, past epoch {state.epoch}"
        )
    return RankHello(
        deployment=message.deployment,
        rank=message.rank,
        node=message.node,
        token_group=message.token_group,
        group_id=message.group_id,
        shape=shape,
        epoch=state.epoch,
        digest=state.digest,
        layer_epochs=tuple(state.layer_epochs),
        slots_LS=unpack(
            state.local_physical_to_logical, (shape.layers, shape.slots), "hello.local_physical_to_logical"
        ),
        log2phy_LE=unpack(state.log2phy, (shape.layers, shape.experts), "hello.log2phy"),
        agent_version=message.agent_version,
    )


def read_shape(ep_size: int, message: agent_pb2.ModelShape) -> Shape:
    """Sizes within all bounds; raises ``RefusedError`` on others."""
    sizes = {
        "ep_size": (ep_size, MOST_RANKS),
        "shape.layers": (message.layers, MOST_LAYERS),
        "shape.experts": (message.experts, MOST_EXPERTS),
        "shape.slots": (message.slots, MOST_SLOTS),
    }
    for field, (size, most) in sizes.items():
        if not 1 <= size <= most:
            raise invalid(f"hello.{field} is {size}; it must be 1 to {most}")
    ranks, layers, experts, slots = (size for size, _ in sizes.values())
    if ranks * layers * experts > MOST_TABLE_ENTRIES or layers * max(experts, ranks) > MOST_LAYER_ENTRIES:
        raise invalid(
            f"{layers} layers x {experts} experts on {ranks} ranks are past what is taken: {MOST_TABLE_ENTRIES} for "
            f"ranks x layers x experts, {MOST_LAYER_ENTRIES} for layers x experts and layers x ranks"
        )
    try:
        check_shape(experts, ranks, slots)
    except PlacementError as error:
        raise invalid(f"hello.shape: {error}") from error
    return Shape(ranks, layers, experts, slots, message.bytes_per_expert)


def _check_texts(message: agent_pb2.Hello) -> None:
    if not _NAME.fullmatch(message.deployment):
        raise invalid(
            f"hello.deployment is {message.deployment[:LONGEST_TEXT]!r}; a name has 1 to 63 letters, digits, '.', '_' "
            "or '-' and starts with a letter or digit"
        )
    texts = {"node": message.node, "group_id": message.group_id, "agent_version": message.agent_version}
    for field, text in texts.items():
        if len(text) > LONGEST_TEXT:
            raise invalid(f"hello.{field} has {len(text)} characters; at most {LONGEST_TEXT} are taken")
    if not message.group_id:
        raise invalid("hello.group_id is empty; it names one forming of the EP group")
