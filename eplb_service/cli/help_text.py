"""How ``--help`` looks: plain text in sections, whole at 80 columns, brackets as they are written, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from eplb_service.cli.repeated import check_repeated

ARGUMENTS, OPTIONS = "Arguments", "Options"
"""Headings of what belongs to no section of its own; they come first."""


class HelpCommand(TyperCommand):
    """A command whose help lists its options by section, and that refuses an option given twice.

    ``examples`` are lines of the shell that show it in use.
    """

    examples: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, once none of them repeats an option."""
        if not ctx.resilient_parsing:
            check_repeated(self, ctx, args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, each section under its heading, in the order in which the command declares them."""
        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        super().format_epilog(ctx, formatter)
        write_examples(self.examples, formatter)


class HelpGroup(TyperGroup):
    """A group of commands whose help lists the commands by section, after its options."""

    examples: Sequence[str] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the group's own options, then its commands."""
        write_options(self, ctx, formatter)
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

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        super().format_epilog(ctx, formatter)
        write_examples(self.examples, formatter)


def write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments and options of ``command`` by section, those without a section first."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        heading = getattr(parameter, "rich_help_panel", None)
        if not isinstance(heading, str):
            heading = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
        sections.setdefault(heading, []).append(record)
    first = {heading: sections.pop(heading) for heading in (ARGUMENTS, OPTIONS) if heading in sections}
    _write_sections({**first, **sections}, formatter)


def write_examples(examples: Sequence[str], formatter: Any) -> None:
    """Write lines as they are, to be copied."""
    if examples:
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for heading, records in sections.items():
        with formatter.section(heading):
            formatter.write_dl(records)
