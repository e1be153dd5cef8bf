"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.docs_reference.markdown import code, escaped, plain, table


class Option(NamedTuple):
    """One option or argument of a command, each text empty where there is none.

    ``flags`` are as written in a shell, of an argument its name in capitals; ``value`` is what follows the flag, as
    ``PATH``; ``variable`` the environment variable that sets it too; ``section`` its heading in ``--help``.
    """

    flags: tuple[str, ...]
    value: str
    default: str
    variable: str
    help: str
    section: str


class Command(NamedTuple):
    """One command: its full name such as ``eplb trace stats``, its help, its options in order, and examples."""

    name: str
    help: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


def commands() -> Iterator[Command]:
    """Every command of ``eplb``, subcommands included, in the order of ``eplb --help``."""
    from eplb_service.cli.main import COMMANDS, EXAMPLES, load_command

    for top in COMMANDS:
        parser = load_command(top)
        children = {f"eplb {top} {child}": one for child, one in getattr(parser, "commands", {}).items()}
        for name, command in (children or {f"eplb {top}": parser}).items():
            options = tuple(_option(parameter) for parameter in command.params if parameter.name != "help")
            examples = tuple(line for line in EXAMPLES if f"{line} ".startswith(f"{name} "))
            yield Command(name, plain(command.help or ""), options, examples)


def _option(parameter: Any) -> Option:
    is_argument = parameter.param_type_name == "argument"
    flags = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = "" if parameter.default is None or callable(parameter.default) else str(parameter.default)
    if isinstance(parameter.default, bool):
        default = ("on" if parameter.default else "off") if parameter.secondary_opts else ""
    return Option(
        flags=tuple(flags),
        value="" if is_argument or parameter.is_flag else str(parameter.metavar),
        default="required" if parameter.required else default,
        variable=parameter.envvar or "",
        help=plain(parameter.help or ""),
        section=getattr(parameter, "rich_help_panel", None) or "",
    )


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
        parts.append(f"## {command.name}\n\n{escaped(command.help)}\n")
        parts.append("\n".join(["```", *command.examples, "```\n"]))
        for section in sorted(dict.fromkeys(option.section for option in command.options), key=bool):
            parts.append(f"**{section}**\n" if section else "")
            rows = [_row(option) for option in command.options if option.section == section]
            parts.append(table(("option", "default", "meaning"), rows))
    return "\n".join(parts) + "\n"


def _row(option: Option) -> tuple[str, str, str]:
    flags = " ".join(f"`{flag}`" for flag in option.flags)
    value = f" `{option.value}`" if option.value else ""
    return flags + value, code(option.default), escaped(option.help) + _variable_note(option)


def _variable_note(option: Option) -> str:
    return "" if not option.variable or option.variable in option.help else f" Variable: `{option.variable}`."
