"""A message as a document of plain values, for ``--json`` and for the service's JSON over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eplb_service.wire.codec import unpack
from eplb_service.wire.generated import tensor_pb2


def as_document(message: Any) -> dict[str, Any]:
    """Every field by its name, messages within as documents.

    64-bit numbers stay numbers, digests are hexadecimal text, packed arrays nested lists; what is optional or a message
    and absent is ``None``.

    Raises
    ------
    WireError
        A packed array within does not hold what it claims.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [as_document(item) if field.message_type else item for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    if field.message_type is None:
        return f"{value:#018x}" if field.name == "digest" else value
    if isinstance(value, tensor_pb2.PackedArray):
        return unpack(value, [None] * len(value.shape), field.name).tolist()
    return as_document(value)
