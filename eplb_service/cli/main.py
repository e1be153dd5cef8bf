"""The entry point ``eplb``: finds the command asked for, and ends a user's mistake in one clear line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

import eplb_service
from eplb_service.cli.command_list import COMMANDS
from eplb_service.cli.errors import UserError
from eplb_service.cli.help_text import HelpCommand, HelpGroup

# typer brings a click of its own or uses the installed one; either way its usage errors have this base.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

USAGE_EXIT_CODE = 2
"""Exit code of everything that the user can correct: arguments, files, addresses."""
INTERRUPT_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells have it."""


BROKEN_PIPE_EXIT_CODE = 141
"""Exit code where the reader of the output has left, as shells have it for SIGPIPE."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LazyGroup(HelpGroup):
    """Lists commands from ``COMMANDS`` alone and imports a command's module only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            stand_in = HelpCommand(name, help=entry.summary, rich_help_panel=entry.panel)
            self.add_command(stand_in)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, for the first of ``args``, and the arguments that are left for it."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import the command's module and build its parser."""
    module = importlib.import_module(f"eplb_service.cli.{COMMANDS[name].module}")
    command = getattr(module, name)
    if isinstance(command, typer.Typer):
        parser: Any = typer.main.get_command(command)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, cls=HelpCommand)(command)
        parser = typer.main.get_command(single)
    parser.examples = COMMANDS[name].examples
    for child in getattr(parser, "commands", {}).values():
        child.examples = [line for line in parser.examples if line.startswith(f"eplb {name} {child.name} ")]
    return parser


app = typer.Typer(name="eplb", cls=LazyGroup, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eplb {eplb_service.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def eplb(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Keep the ranks of expert-parallel models evenly loaded while they serve."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``eplb`` and leave with its exit code; ``arguments`` default to those of the process."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``eplb`` and return its exit code.

    What the user can correct ends in one line on stderr and ``USAGE_EXIT_CODE``; any other exception is a bug
    and passes through.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="eplb", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPT_EXIT_CODE
    except (BrokenPipeError, SystemExit) as error:
        # Where the reader has left while a command prints, typer turns that into an exit.
        if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
            raise
        _discard_output()
        return BROKEN_PIPE_EXIT_CODE
    except typer.Abort:
        return _refuse("aborted")
    except _UsageError as error:
        return _refuse(_usage_message(error))
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            _discard_output()
            return _refuse(f"the output cannot be written ({error.strerror})")
        if not is_users_mistake(error):
            raise
        return _refuse(str(error))
    return code if isinstance(code, int) else 0


def is_users_mistake(error: Exception) -> bool:
    """Whether ``error`` is a user's to correct: our own ``UserError`` and ``ValueError`` kinds, or a file.

    A bare ``ValueError`` is not: it was not raised for a user to read.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    is_ours = type(error).__module__.startswith(("eplb_service.", "worker_agent."))
    return isinstance(error, UserError) or (is_ours and isinstance(error, ValueError))


def _discard_output() -> None:
    """Give stdout a place to go, so that what is left in its buffer raises nothing while Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_message(error: Exception) -> str:
    message = str(cast("Any", error).format_message())
    context = getattr(error, "ctx", None)
    return f"{message} (see '{context.command_path} --help')" if context else message


def _refuse(message: str) -> int:
    typer.echo(f"eplb: error: {' '.join(message.split())}", err=True)
    return USAGE_EXIT_CODE


if __name__ == "__main__":
    main()
