"""The entry point ``eplb``: finds the command asked for, and turns a user's mistake into one clear line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup

import eplb_service
from eplb_service.cli.errors import UserError

# typer brings a click of its own or uses the installed one; either way its usage errors have this base.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

USAGE_EXIT_CODE = 2
"""Exit code of everything that the user can mend: arguments, files, addresses."""
INTERRUPT_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells have it."""


class CommandEntry(NamedTuple):
    """Where a command lives; its function, or its group of commands, has the command's name."""

    module: str
    panel: str
    summary: str


_OFFLINE = "On recorded heat"
_SERVICE = "The service"
_OPERATE = "Ask a running service"

COMMANDS = {
    "demo": CommandEntry("demo", _SERVICE, "Run service and live ranks here and watch them balance."),
    "serve": CommandEntry("serve", _SERVICE, "Run the control plane that agents connect to."),
    "solve": CommandEntry("solve", _OFFLINE, "Compute a placement from recorded heat."),
    "replay": CommandEntry("replay", _OFFLINE, "Run the planner along a trace and score each policy."),
    "advise": CommandEntry("advise", _OFFLINE, "Say what to set, and whether balancing pays."),
    "trace": CommandEntry("trace", _OFFLINE, "Look at heat traces, record, convert, or cut them."),
    "warmup": CommandEntry("warmup", _OFFLINE, "Compile the solver once, so that later starts need not."),
    "deployments": CommandEntry("operate", _OPERATE, "List the deployments."),
    "status": CommandEntry("operate", _OPERATE, "Show one deployment: balance, agents, last decision."),
    "history": CommandEntry(
        "history", _OPERATE, "Show past plans: what they promised and what became of them."
    ),
    "placement": CommandEntry("operate", _OPERATE, "Show or save the placement in force."),
    "pause": CommandEntry("operate", _OPERATE, "Stop planning for a deployment."),
    "resume": CommandEntry("operate", _OPERATE, "Plan for a paused deployment again."),
    "rebalance": CommandEntry("operate", _OPERATE, "Decide now instead of at the next interval."),
}


class LazyGroup(TyperGroup):
    """Lists commands from ``COMMANDS`` alone and imports a command's module only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            stand_in = TyperCommand(name, help=entry.summary, rich_help_panel=entry.panel)
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
        return typer.main.get_command(command)
    single = typer.Typer(add_completion=False)
    single.command(name)(command)
    return typer.main.get_command(single)


app = typer.Typer(name="eplb", cls=LazyGroup)


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

    What the user can mend ends in one line on stderr and ``USAGE_EXIT_CODE``; any other exception is a bug
    and passes through.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="eplb", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPT_EXIT_CODE
    except typer.Abort:
        return _refuse("aborted")
    except _UsageError as error:
        return _refuse(_usage_message(error))
    except Exception as error:
        if not is_users_mistake(error):
            raise
        return _refuse(str(error))
    return code if isinstance(code, int) else 0


def is_users_mistake(error: Exception) -> bool:
    """Whether ``error`` tells a user what to mend: our own ``UserError`` and ``ValueError`` kinds, or a file.

    A bare ``ValueError`` is not: it was not raised for a user to read.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    is_ours = type(error).__module__.startswith(("eplb_service.", "worker_agent."))
    return isinstance(error, UserError) or (is_ours and isinstance(error, ValueError))


def _usage_message(error: Exception) -> str:
    message = str(cast("Any", error).format_message())
    context = getattr(error, "ctx", None)
    return f"{message} (see '{context.command_path} --help')" if context else message


def _refuse(message: str) -> int:
    typer.echo(f"eplb: error: {' '.join(message.split())}", err=True)
    return USAGE_EXIT_CODE


if __name__ == "__main__":
    main()
