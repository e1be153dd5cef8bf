"""Help in plain text by section, whole at 80 columns, with examples; and refusal of an option given twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

_ARGUMENTS, _OPTIONS = "Arguments", "Options"
_WIDEST_NAME = 22
"""Characters of an option beside which its help begins on the same line."""


class _Sections:
    """Help with options by section, in the order in which they are declared, and ``examples`` at its end.

    ``examples`` are lines of the shell that show the command in use.
    """

    examples: Sequence[str] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, each section under its heading."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples, as they are, to be copied."""
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class HelpCommand(_Sections, TyperCommand):
    """A command that refuses an option given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, once none of them repeats an option."""
        if not ctx.resilient_parsing:
            _refuse_repeated(self, ctx, args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


class HelpGroup(_Sections, TyperGroup):
    """A group of commands whose help lists the commands by section, after its options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the group's own options, then its commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None)
                summary = (name, command.get_short_help_str(limit=200))
                sections.setdefault(heading if isinstance(heading, str) else "Commands", []).append(summary)
        _write_sections(sections, formatter)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Arguments and options by section, those without a section first."""
    sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        heading = getattr(parameter, "rich_help_panel", None)
        if not isinstance(heading, str):
            heading = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
        sections.setdefault(heading, []).append(record)
    _write_sections({heading: records for heading, records in sections.items() if records}, formatter)


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records, col_max=_WIDEST_NAME)


def _refuse_repeated(command: Any, ctx: Any, arguments: Sequence[str]) -> None:
    """Fail with a usage error where an option is given twice that may be given once.

    Switches that have no opposite are left alone.
    """
    *_, given = command.make_parser(ctx).parse_args(args=list(arguments))
    for option, times in Counter(given).items():
        if times < 2 or option.param_type_name != "option" or option.multiple or option.count:
            continue
        if option.is_flag and not option.secondary_opts:
            continue
        flag = "/".join([*option.opts, *option.secondary_opts])
        several = (option.metavar or "").endswith(",...")
        ctx.fail(
            f"{flag} is given {'twice' if times == 2 else f'{times} times'}; "
            + ("write its values with commas between them" if several else "give it once")
        )
