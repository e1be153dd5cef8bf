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

    @property
    def is_argument(self) -> bool:
        """It is given by its place."""
        return not self.flags[0].startswith("-")


class Command(NamedTuple):
    """One command: its full name such as ``eplb trace stats``, its help, its options in order, and examples."""

    name: str
    help: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


def commands() -> Iterator[Command]:
    """Every command of ``eplb``, subcommands included, in the order of ``eplb --help``."""
    from eplb_service.cli.main import COMMANDS, load_command

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
    yield Command(name, plain(command.help or ""), tuple(options), examples)


def _option(parameter: Any) -> Option:
    is_argument = not parameter.opts[0].startswith("-")
    flags = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    variable = parameter.envvar or ""
    return Option(
        flags=tuple(flags),
        value="" if is_argument or getattr(parameter, "is_flag", False) else str(parameter.metavar),
        default=_default(parameter),
        variable=variable if isinstance(variable, str) else ", ".join(variable),
        help=plain(parameter.help or ""),
        section=getattr(parameter, "rich_help_panel", None) or "",
    )


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
        parts.append(f"## {command.name}\n\n{escaped(command.help)}\n")
        parts.append("\n".join(["```", *(command.examples or (usage,)), "```\n"]))
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
