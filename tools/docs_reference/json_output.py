"""The reference of what commands print with ``--json``, and its schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.docs_reference.markdown import escaped, table


def schema_files() -> dict[str, str]:
    """The JSON schema of each command's document, by its path in the site."""
    from eplb_service.cli.schema import COMMANDS, schema_text

    return {f"reference/schemas/{name.replace(' ', '-')}.json": schema_text(name) for name in COMMANDS}


def json_page() -> str:
    """``reference/json.md``."""
    from eplb_service.cli.schema import COMMANDS, schema_document

    parts = [
        "# JSON\n\n"
        "What commands print with `--json`, generated from the code that defines it. `eplb schema COMMAND` prints the "
        "[JSON schema](https://json-schema.org) of each, which is also linked here; tests hold the commands to them. "
        "Later versions may add fields. Ratios that there are not, such as the PAR of a layer without tokens, are "
        "`null`.\n"
    ]
    for name in COMMANDS:
        schema = schema_document(name)
        parts.append(f"## eplb {name}\n\n{escaped(schema.get('description', ''))}\n")
        parts.append(table(("field", "type", "meaning"), list(_fields(schema, schema.get("$defs", {}), ""))))
        parts.append(f"Schema: [{name}](schemas/{name.replace(' ', '-')}.json).\n")
    return "\n".join(parts) + "\n"


def _fields(schema: dict[str, Any], named: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """A row for each field, those of objects within after the object's own."""
    for name, field in schema["properties"].items():
        kind, within = _json_kind(field, named)
        yield f"`{prefix}{name}`", kind, escaped(field.get("description", "").replace("``", ""))
        if within is not None:
            yield from _fields(within, named, f"{prefix}{name}.")


def _json_kind(schema: dict[str, Any], named: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """A type as text, and the object whose fields it has, if any."""
    if "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        kinds = [_json_kind(part, named) for part in schema["anyOf"]]
        return " or ".join(kind for kind, _ in kinds), next((part for _, part in kinds if part), None)
    if isinstance(schema.get("type"), list):
        return " or ".join(schema["type"]), None
    if schema.get("type") == "array":
        kind, within = _json_kind(schema["items"], named) if "items" in schema else ("numbers", None)
        return f"list of {kind}", within
    if isinstance(schema.get("additionalProperties"), dict):
        kind, within = _json_kind(schema["additionalProperties"], named)
        return f"{kind} by name", within
    return schema.get("type", "value"), schema if "properties" in schema else None
