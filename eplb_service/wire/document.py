"""A message as a document of plain values, for ``--json`` and the service's JSON over HTTP, and its schema."""

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


_KINDS = {
    "TYPE_DOUBLE": ["number", "null"],
    "TYPE_FLOAT": ["number", "null"],
    "TYPE_BOOL": "boolean",
    "TYPE_STRING": "string",
}
"""JSON types of protobuf's; all others that are used here are integers. A ratio that there is not is ``null``."""


def schema_of(descriptor: Any) -> dict[str, Any]:
    """The JSON schema of what ``as_document`` makes of messages of this type; later versions may add fields."""
    properties = {field.name: _field_schema(field) for field in descriptor.fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _field_schema(field: Any) -> dict[str, Any]:
    one = _one_schema(field)
    if _is_repeated(field):
        return {"type": "array", "items": one}
    if field.has_presence:
        return {"anyOf": [one, {"type": "null"}]}
    return one


def _is_repeated(field: Any) -> bool:
    # protobuf 5 has labels in place of the property.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _one_schema(field: Any) -> dict[str, Any]:
    if field.message_type is not None:
        if field.message_type.full_name == tensor_pb2.PackedArray.DESCRIPTOR.full_name:
            return {"type": "array", "description": "Nested lists of numbers."}
        return schema_of(field.message_type)
    if field.name == "digest":
        return {"type": "string", "pattern": "^0x[0-9a-f]{16}$"}
    return {
        "type": next((kind for name, kind in _KINDS.items() if field.type == getattr(field, name)), "integer")
    }
