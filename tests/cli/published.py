"""Holds what a command printed to the JSON schema that is published for it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from eplb_service.cli.schema import schema_document


def held(command: str, printed: str) -> Any:
    """The document, once it is what the schema says, without a field that the schema does not name."""
    document = json.loads(printed)
    jsonschema.Draft202012Validator(_closed(schema_document(command))).validate(document)
    return document


def _closed(schema: Any) -> Any:
    """The schema, refusing fields that it does not name."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in schema else closed
