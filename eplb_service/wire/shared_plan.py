"""One plan for all ranks: encoded once, as ranks' messages differ in nothing but their own tables.

A plan names all ranks' slots, so that all ranks' messages together grow with the square of the ranks. A rank's message
is put together of the bytes that all share and its own tables, byte for byte in protobuf's encoding, when it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eplb_service.placement import Int32
from eplb_service.wire.codec import Integers, narrowed, pack
from eplb_service.wire.generated import agent_pb2, tensor_pb2
from eplb_service.wire.plan import RankPlan

_LENGTH_DELIMITED = 2
"""Protobuf's wire type of bytes and messages."""


@dataclass(frozen=True)
class SharedPlan:
    """All ranks' messages of one plan.

    Parameters
    ----------
    head
        The plan's own fields.
    layers
        For each layer what goes before a rank's table, and all tables, ``[R, ...]``, as they travel.
    """

    head: bytes
    layers: tuple[tuple[bytes, Integers], ...]

    @classmethod
    def of(cls, plan: RankPlan, tables: Sequence[Int32]) -> SharedPlan:
        """Encode what all ranks receive.

        Parameters
        ----------
        plan
            As any one rank receives it.
        tables
            All ranks' tables of each of its layers, int32 ``[R, E]``, or ``[R, E, D]`` where they deal.
        """
        head = agent_pb2.Plan(
            plan_id=plan.plan_id,
            leader_term=plan.leader_term,
            base_epoch=plan.base_epoch,
            base_digest=plan.base_digest,
            digest=plan.digest,
        )
        layers = []
        for layer, table in zip(plan.layers, tables, strict=True):
            common = agent_pb2.LayerUpdate(
                layer=layer.layer,
                physical_to_logical=pack(layer.phy2log_RS),
                log2phy_digests=layer.log2phy_digests,
                moves=pack(layer.moves_M5),
            )
            code, narrow = narrowed(table)
            before = _before_row(code, narrow[0])
            own_bytes = len(before) + narrow[0].nbytes
            update = common.SerializeToString() + _tag(agent_pb2.LayerUpdate, "log2phy", own_bytes) + before
            layers.append((_tag(agent_pb2.Plan, "layers", len(update) + narrow[0].nbytes) + update, narrow))
        return cls(head.SerializeToString(), tuple(layers))

    @property
    def size(self) -> int:
        """Bytes of one rank's message, but for the few that say what follows."""
        own_bytes = sum(len(before) + int(tables[0].nbytes) for before, tables in self.layers)
        return len(self.head) + own_bytes

    def response(self, rank: int) -> bytes:
        """The ``ConnectResponse`` for one rank, encoded."""
        pieces = [self.head]
        for before, tables in self.layers:
            pieces += before, tables[rank].tobytes()
        length = sum(len(piece) for piece in pieces)
        return b"".join((_tag(agent_pb2.ConnectResponse, "plan", length), *pieces))


def _before_row(code: int, row: Integers) -> bytes:
    """All of a ``PackedArray`` but its last bytes, which are the row's."""
    described = tensor_pb2.PackedArray(dtype=code, shape=row.shape)  # type: ignore[arg-type]
    return described.SerializeToString() + _tag(tensor_pb2.PackedArray, "data", row.nbytes)


def _tag(message: Any, field: str, length: int) -> bytes:
    """What goes before ``length`` bytes of a field."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(length)


def _varint(number: int) -> bytes:
    """Seven bits at a time, the lowest first; the eighth says that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
