"""The CLI and settings reference of the docs site, generated from the commands and settings classes themselves.

A hook of MkDocs (`hooks` in mkdocs.yml): `make docs` adds the generated pages, and those files of the repository's root
that are pages of the site too.
"""

from __future__ import annotations

import base64
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root that are pages of the site, and their paths there."""

_NOTEBOOK = "examples/decision.ipynb"
_EXAMPLE = re.compile(r"^# (docs/examples/\w+\.py)$", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """One option or argument of a command.

    Parameters
    ----------
    flags
        As written in a shell: ``--warm``, ``--no-warm``; of an argument its name in capitals.
    value
        What follows the flag, such as ``PATH``; empty where nothing does.
    default
        As text; empty where there is none.
    variable
        Environment variable that sets it too; empty where there is none.
    help
        Its sentence in ``--help``.
    section
        Heading under which ``--help`` lists it; empty where it has none.
    """

    flags: tuple[str, ...]
    value: str
    default: str
    variable: str
    help: str
    section: str

    @property
    def is_argument(self) -> bool:
        """Whether it is given by its place."""
        return not self.flags[0].startswith("-")


@dataclass(frozen=True)
class Command:
    """One command: its full name such as ``eplb trace stats``, its help, examples, and its options in order."""

    name: str
    help: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One setting of the service or of an agent, with the constraints that its value is checked against."""

    name: str
    variable: str
    kind: str
    default: str
    description: str


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site (called by MkDocs)."""
    from mkdocs.structure.files import File

    for path, text in (generated_pages() | schema_files()).items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page of ``docs/`` as it is in the site (called by MkDocs).

    Links to the repository's root become links to its pages, and a line ``# docs/examples/NAME.py`` that file.
    """
    for name, path in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name})", f"]({path})")
    return _EXAMPLE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8").strip(), markdown)


def generated_pages() -> dict[str, str]:
    """Markdown of every page that is not in ``docs/``, by its path in the site."""
    pages = {
        "reference/cli.md": cli_page(),
        "reference/settings.md": settings_page(),
        "reference/json.md": json_page(),
    }
    pages["notebook.md"] = notebook_page()
    for name, path in ROOT_PAGES.items():
        pages[path] = site_links((ROOT / name).read_text(encoding="utf-8"))
    return pages


def site_links(text: str) -> str:
    """Markdown of a page at the repository's root, with its links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target in ROOT_PAGES:
            return f"[{label}]({ROOT_PAGES[target]})"
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target.startswith(("http", "#")):
            return match[0]
        return label

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def notebook_page() -> str:
    """``notebook.md``: the cells of the notebook and what they printed and drew, as ``tools/notebook.py`` kept it."""
    parts = [f"[This page as a notebook]({_NOTEBOOK})."]
    for cell in json.loads((ROOT / "docs" / _NOTEBOOK).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source.replace("](../", "](")
        )
        for output in cell.get("outputs", ()):
            picture = "".join(output.get("data", {}).get("image/svg+xml", ()))
            printed = "".join(output.get("text", ()))
            # As a file of its own, so that its style stays its own.
            image = base64.b64encode(picture.encode()).decode()
            drawn = f'<img alt="the chart" src="data:image/svg+xml;base64,{image}">'
            parts.append(drawn if picture else f"```text\n{printed}```")
    heading = parts.pop(1)
    return "\n\n".join([heading, *parts]) + "\n"


# The command line


def commands() -> Iterator[Command]:
    """Every command of ``eplb``, subcommands included, in the order of ``eplb --help``."""
    from eplb_service.cli.command_list import COMMANDS
    from eplb_service.cli.main import load_command

    for name in COMMANDS:
        yield from _walk(f"eplb {name}", load_command(name))


def _walk(name: str, command: Any) -> Iterator[Command]:
    subcommands = getattr(command, "commands", None)
    if subcommands:
        for child, subcommand in subcommands.items():
            yield from _walk(f"{name} {child}", subcommand)
        return
    options = (_option(parameter) for parameter in command.params if parameter.name != "help")
    examples = tuple(getattr(command, "examples", ()))
    yield Command(name, _plain(command.help or ""), tuple(options), examples)


def _option(parameter: Any) -> Option:
    is_argument = not parameter.opts[0].startswith("-")
    flags = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    variable = parameter.envvar or ""
    return Option(
        flags=tuple(flags),
        value="" if is_argument or getattr(parameter, "is_flag", False) else _value(parameter),
        default=_default(parameter),
        variable=variable if isinstance(variable, str) else ", ".join(variable),
        help=_plain(parameter.help or ""),
        section=getattr(parameter, "rich_help_panel", None) or "",
    )


def _value(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    descriptor = getattr(parameter, "type_descriptor", None)
    kind = getattr(descriptor, "annotation", None) or getattr(parameter, "type", None)
    name = str(getattr(kind, "__name__", None) or getattr(kind, "name", "value"))
    return {"str": "TEXT", "int": "INTEGER", "float": "FLOAT"}.get(name, name.upper())


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default is None or callable(parameter.default):
        return ""
    if isinstance(parameter.default, bool):
        return ("on" if parameter.default else "off") if parameter.secondary_opts else ""
    return str(parameter.default)


def cli_page() -> str:
    """``reference/cli.md``."""
    parts = [
        "# Command line\n\n"
        "Generated from the commands themselves; `eplb COMMAND --help` says the same. A mistake in arguments, files or "
        "addresses ends with one line on stderr and exit code 2.\n\n"
        "| exit code | means |\n|---|---|\n"
        "| 0 | done |\n"
        "| 1 | what was asked for did not hold: outputs of a demo that differ, a lease that was lost |\n"
        "| 2 | something to correct: arguments, files, addresses, a full disk |\n"
        "| 130, 141 | Ctrl-C; the reader of the output has left |\n\n"
        "`eplb --install-completion` completes commands and options in bash, zsh and fish, from the next shell on; "
        "`eplb --show-completion` prints the script instead. A mistyped command is answered with those that are near."
    ]
    for command in commands():
        arguments = " ".join(option.flags[0] for option in command.options if option.is_argument)
        options = " [OPTIONS]" if any(not option.is_argument for option in command.options) else ""
        usage = " ".join(f"{command.name}{options} {arguments}".split())
        parts.append(f"## {command.name}\n\n{_escaped(command.help)}\n")
        parts.append("\n".join(["```", *(command.examples or (usage,)), "```\n"]))
        for section in dict.fromkeys(option.section for option in command.options):
            parts.append(f"**{section}**\n" if section else "")
            rows = [_row(option) for option in command.options if option.section == section]
            parts.append(_table(("option", "default", "meaning"), rows))
    return "\n".join(parts) + "\n"


def _row(option: Option) -> tuple[str, str, str]:
    flags = " ".join(f"`{flag}`" for flag in option.flags)
    value = f" `{option.value}`" if option.value else ""
    return flags + value, _code(option.default), _escaped(option.help) + _variable_note(option)


def _variable_note(option: Option) -> str:
    return "" if not option.variable or option.variable in option.help else f" Variable: `{option.variable}`."


# JSON


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
        parts.append(f"## eplb {name}\n\n{_escaped(schema.get('description', ''))}\n")
        parts.append(_table(("field", "type", "meaning"), list(_fields(schema, schema.get("$defs", {}), ""))))
        parts.append(f"Schema: [{name}](schemas/{name.replace(' ', '-')}.json).\n")
    return "\n".join(parts) + "\n"


def _fields(schema: dict[str, Any], named: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """A row for each field, those of objects within after the object's own."""
    for name, field in schema["properties"].items():
        kind, within = _json_kind(field, named)
        yield f"`{prefix}{name}`", kind, _escaped(field.get("description", "").replace("``", ""))
        if within is not None:
            yield from _fields(within, named, f"{prefix}{name}.")


def _json_kind(schema: dict[str, Any], named: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """A type in words, and the object whose fields it has, if any."""
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


# Settings


def service_settings() -> list[Setting]:
    """Every setting of ``eplb serve``: flag, variable and YAML key alike."""
    from eplb_service.control.server.settings import ENVIRONMENT_PREFIX, ServiceSettings

    return [_setting(name, ENVIRONMENT_PREFIX, field) for name, field in ServiceSettings.model_fields.items()]


def agent_settings() -> list[Setting]:
    """Every setting of an agent."""
    from worker_agent.settings import AgentSettings

    return [_setting(name, "EPLB_AGENT_", field) for name, field in AgentSettings.model_fields.items()]


def command_variables() -> dict[str, str]:
    """Environment variables that commands read beside those of the settings, with the help of their options."""
    of_settings = {setting.variable for setting in service_settings()}
    return {
        option.variable: option.help
        for command in commands()
        for option in command.options
        if option.variable and option.variable not in of_settings
    }


def _setting(name: str, prefix: str, field: Any) -> Setting:
    bounds = [
        f"{sign} {bound}"
        for part in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (bound := getattr(part, attribute, None)) is not None
    ]
    kind = _kind(field.annotation)
    if field.default_factory is not None:
        default = f"{field.default_factory.__name__}()"
    else:
        default = "unset" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
    return Setting(
        name, prefix + name.upper(), ", ".join([kind, *bounds]), default, _plain(field.description or "")
    )


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        choices = [choice for choice in typing.get_args(annotation) if choice is not types.NoneType]
        return " or ".join(_kind(choice) for choice in choices)
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(typing.get_args(annotation))
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    names |= {"Path": "path", "SecretStr": "secret text"}
    return names.get(text, text)


def settings_page() -> str:
    """``reference/settings.md``."""
    from eplb_service.planner.settings import PlannerSettings

    planner = set(PlannerSettings.__dataclass_fields__)
    service = service_settings()
    parts = [
        "# Settings\n\nGenerated from the settings classes; a test holds this page to them.\n",
        "## Service\n\nEach is a flag of `eplb serve` (`listen` is `--listen`), an environment variable, and a key of "
        "the YAML file given with `--config`. A flag goes before its variable, that before the file, that before the "
        "default. An unknown variable that begins with `EPLB_`, or an unknown key, is an error.\n",
        _settings_table(setting for setting in service if setting.name not in planner),
        "\n## Planner\n\nSettings of the service that say how decisions are made. `eplb solve`, `eplb replay` and "
        "`eplb advise` have them as options too, under the same names.\n",
        _settings_table(setting for setting in service if setting.name in planner),
        "\n## Agent\n\nFields of `AgentSettings`, each an environment variable of the inference process too; an "
        "argument goes before its variable, that before the default. What ranks must agree on they compare when "
        "they start.\n",
        _settings_table(agent_settings()),
        "\n## Commands that ask a running service\n\nOptions of `eplb status` and its like that are variables too.\n",
        _table(
            ("variable", "meaning"),
            [(f"`{variable}`", _escaped(text)) for variable, text in sorted(command_variables().items())],
        ),
    ]
    return "\n".join(parts) + "\n"


def _settings_table(settings: Iterable[Setting]) -> str:
    return _table(
        ("setting", "variable", "value", "default", "meaning"),
        [
            (
                f"`{setting.name}`",
                f"`{setting.variable}`",
                _escaped(setting.kind),
                _code(setting.default),
                _escaped(setting.description),
            )
            for setting in settings
        ],
    )


# Markdown


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def _code(text: str) -> str:
    return f"`{text}`" if text and text not in {"required", "unset"} else text


def _escaped(text: str) -> str:
    """Text of a program, safe between Markdown."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text) if "`" not in text else text


def _plain(text: str) -> str:
    """One line for each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\f", "").split("\n\n"))
