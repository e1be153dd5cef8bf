"""Reference page for the command line, generated from the commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.docs_reference.markdown import code, escaped, plain, table


class Option(NamedTuple):
    """Option or argument of a command. Fields that do not apply are empty strings.

    Parameters
    ----------
    flags
        Flags as written in a shell; for an argument, its name in capitals.
    value
        Placeholder for the value, such as ``PATH``.
    default
        Default value as text, or ``required``.
    variable
        Environment variable that also sets the option.
    help
        Help text.
    section
        Heading in ``--help``.
    """

    flags: tuple[str, ...]
    value: str
    default: str
    variable: str
    help: str
    section: str


class Command(NamedTuple):
    """Command with its full name, such as ``eplb trace stats``, its help, its options in order, and its examples."""

    name: str
    help: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


def commands() -> Iterator[Command]:
    """Yield every ``eplb`` command, including subcommands, in the order of ``eplb --help``."""
    from eplb_service.cli.main import COMMANDS, EXAMPLES, load_command

    for top in COMMANDS:
        parser = load_command(top)
        children = {f"eplb {top} {name}": child for name, child in getattr(parser, "commands", {}).items()}
        for name, command in (children or {f"eplb {top}": parser}).items():
            options = tuple(_option(parameter) for parameter in command.params if parameter.name != "help")
            examples = tuple(line for line in EXAMPLES if f"{line} ".startswith(f"{name} "))
            yield Command(name, plain(command.help or ""), options, examples)


def _option(parameter: Any) -> Option:
    is_argument = parameter.param_type_name == "argument"
    flags = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = "" if parameter.default is None or callable(parameter.default) else str(parameter.default)
    if isinstance(parameter.default, bool):
        default = ""
        if parameter.secondary_opts:
            default = "on" if parameter.default else "off"
    return Option(
        flags=tuple(flags),
        value="" if is_argument or parameter.is_flag else str(parameter.metavar),
        default="required" if parameter.required else default,
        variable=parameter.envvar or "",
        help=plain(parameter.help or ""),
        section=getattr(parameter, "rich_help_panel", None) or "",
    )


def cli_page() -> str:
    """Return the text of ``reference/cli.md``."""
    sections = [
        "# Command line\n\n"
        "This page is generated from the commands; `eplb COMMAND --help` prints the same text. After an error in "
        "arguments, files or addresses, a command prints one line on stderr and exits with code 2.\n\n"
        "| exit code | meaning |\n|---|---|\n"
        "| 0 | success |\n"
        "| 1 | the result is negative, for example if the outputs of a demo differ or the lease was lost |\n"
        "| 2 | an error in arguments, files or addresses, or a full disk |\n"
        "| 130, 141 | interrupted by Ctrl-C; the reader of the output has closed the pipe |\n\n"
        "`eplb --install-completion` installs completion of commands and options for bash, zsh and fish, which is "
        "active in the next shell. `eplb --show-completion` prints the script instead. After a mistyped command, "
        "`eplb` suggests similar commands."
    ]
    for command in commands():
        sections.append(f"## {command.name}\n\n{escaped(command.help)}\n")
        sections.append("\n".join(["```", *command.examples, "```\n"]))
        for section in sorted(dict.fromkeys(option.section for option in command.options), key=bool):
            sections.append(f"**{section}**\n" if section else "")
            rows = [_row(option) for option in command.options if option.section == section]
            sections.append(table(("option", "default", "meaning"), rows))
    return "\n".join(sections) + "\n"


def _row(option: Option) -> tuple[str, str, str]:
    flags = " ".join(f"`{flag}`" for flag in option.flags)
    value = f" `{option.value}`" if option.value else ""
    return flags + value, code(option.default), escaped(option.help) + _variable_note(option)


def _variable_note(option: Option) -> str:
    return "" if not option.variable or option.variable in option.help else f" Variable: `{option.variable}`."
