"""The entry point ``eplb``: finds the command asked for, and ends a user's mistake in one clear line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

import eplb_service
from eplb_service.cli.options import HelpCommand, UserError, write_section

# typer brings a click of its own or uses the installed one; either way its usage errors have this base.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

# gRPC logs a line for each connection without TLS. These lines would fill the service's log and clutter a command's
# error output. Set the variable to debug gRPC.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_USAGE_EXIT_CODE = 2
"""Exit code of everything that the user can correct: arguments, files, addresses."""
_INTERRUPT_EXIT_CODE, _BROKEN_PIPE_EXIT_CODE = 130, 141
"""Exit codes after Ctrl-C, and where the reader of the output has left, as shells have them."""

_LAB = "eplb-lab"
"""Distribution of the commands that are found through entry points."""
_ENTRY_POINTS = "eplb.commands"
_OFFLINE, _SERVICE, _OPERATE = "On recorded heat", "The service", "Ask a running service"
COMMANDS = {
    "demo": (_LAB, _SERVICE, "Run service and live ranks here and watch them balance."),
    "serve": ("serve", _SERVICE, "Run the control plane that agents connect to."),
    "solve": ("solve", _OFFLINE, "Compute a placement from recorded heat."),
    "replay": ("replay", _OFFLINE, "Run the planner along a trace and score each policy."),
    "sweep": ("sweep", _OFFLINE, "Replay many traces under many settings, in one table."),
    "advise": ("advise", _OFFLINE, "Advise what to set, and whether balancing pays."),
    "bench": (_LAB, _OFFLINE, "Compare with vLLM's, vLLM-Ascend's and SGLang's balancers."),
    "calibrate": ("calibrate", _OFFLINE, "Fit how long a rank's experts take for their tokens."),
    "trace": ("trace", _OFFLINE, "Look at heat traces, record, convert, or cut them."),
    "warmup": ("warmup", _OFFLINE, "Compile the solver once, so that later starts need not."),
    "deployments": ("operator", _OPERATE, "List the deployments."),
    "status": ("operator", _OPERATE, "Show one deployment: balance, agents, last decision."),
    "top": ("top", _OPERATE, "Watch a service live: balance, ranks, layers, switches."),
    "history": ("operator", _OPERATE, "Show past plans: what they promised and what became of them."),
    "placement": ("operator", _OPERATE, "Show or save the placement in force."),
    "pause": ("operator", _OPERATE, "Stop planning for a deployment."),
    "resume": ("operator", _OPERATE, "Plan for a paused deployment again."),
    "rebalance": ("operator", _OPERATE, "Decide now instead of at the next interval."),
    "lead": ("operator", _OPERATE, "Have a deployment's ranks follow this service again."),
    "forget": ("operator", _OPERATE, "Remove a deployment whose ranks are gone."),
}
"""Module in ``eplb_service.cli``, heading and summary of each command. Listing the commands imports no module.

The function, or the group of commands, has the command's name. Instead of a module, ``_LAB`` marks a command that
eplb-lab provides.
"""
EXAMPLES = """\
eplb demo
eplb demo --ranks 8 --redundant 16 --json summary.json
eplb demo --address 127.0.0.1:50551 --steps 20000
eplb serve
eplb serve --listen 0.0.0.0:50551 --config eplb.yaml
eplb solve --heat heat.zarr --ranks 8 --redundant 16 --out placement.npz
eplb solve --heat heat.pt --ranks 8 --slots 9 --out map.json --format sglang
eplb replay --heat heat.zarr --ranks 8 --redundant 0,8,16 --step-ms 30
eplb replay --heat heat.zarr --ranks 8 --policy all --report report.html
eplb sweep mon.zarr tue.zarr --ranks 8 --redundant 8,16 --interval 128,256
eplb sweep *.zarr --ranks 8 --set par_threshold=1.02,1.1 --ray local
eplb advise --heat heat.zarr --ranks 8 --bytes-per-expert 4000000
eplb bench --heat heat.zarr --ranks 8 --redundant 16 --peers vllm
eplb calibrate --hidden 2048 --inter 1024 --out curve.json
eplb calibrate --table h200_moe_perf.parquet --phase decode --out h200.json
eplb trace info heat.zarr
eplb trace stats heat.zarr --ranks 8
eplb trace record my-deployment --out heat.zarr --steps 2000
eplb trace convert dump.pt --out heat.zarr
eplb trace slice heat.zarr --steps 1000:3000 --layers 0:8 --out part.zarr
eplb trace synth --kind bursty --layers 4 --experts 32 --out made-up.zarr
eplb warmup
eplb deployments --address balancer:50551
eplb status my-deployment --json
eplb top my-deployment
eplb history my-deployment --plan 7
eplb placement my-deployment --out map.json --format sglang --first-layer 3
eplb pause my-deployment
eplb resume my-deployment
eplb rebalance my-deployment
eplb lead my-deployment
eplb forget my-deployment
""".splitlines()
"""Lines of the shell that the help of each command ends with."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(TyperGroup):
    """Lists commands from ``COMMANDS`` alone and imports a command's module only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, _, summary) in COMMANDS.items():
            self.add_command(HelpCommand(name, help=summary))

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write each command with its sentence, by section."""
        for heading in (_OFFLINE, _SERVICE, _OPERATE):
            found = [(name, text) for name, (_, section, text) in COMMANDS.items() if section == heading]
            write_section(formatter, heading, found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, for the first of ``args``, and the arguments that are left for it."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in and load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import the command's module and build its parser."""
    module = COMMANDS[name][0]
    if module == _LAB:
        command = _load_lab_command(name)
    else:
        command = getattr(importlib.import_module(f"eplb_service.cli.{module}"), name)
    if not isinstance(command, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, cls=HelpCommand)(command)
        command = single
    parser: Any = typer.main.get_command(command)
    parser.epilog = _examples(name)
    for child in getattr(parser, "commands", {}).values():
        child.epilog = _examples(f"{name} {child.name}")
    return parser


def _load_lab_command(name: str) -> Any:
    """Load a command of eplb-lab through its entry point. Raises ``UserError`` if eplb-lab is not installed."""
    for entry_point in metadata.entry_points(group=_ENTRY_POINTS, name=name):
        return entry_point.load()
    raise UserError(f"eplb {name} is part of {_LAB}, which is not installed; run: pip install '{_LAB}[demo]'")


def _examples(name: str) -> str:
    """The command's examples, each on a line of its own."""
    lines = [line for line in EXAMPLES if f"{line} ".startswith(f"eplb {name} ")]
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(name="eplb", cls=_LazyGroup, rich_markup_mode=None)


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


def main() -> None:
    """Run ``eplb`` with the process' arguments, and leave with its exit code."""
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``eplb`` and return its exit code; ``arguments`` default to those of the process.

    What the user can correct ends in one line on stderr and ``_USAGE_EXIT_CODE``; any other exception is a bug
    and passes through.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="eplb", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT_CODE
    except (BrokenPipeError, SystemExit) as error:
        # Where the reader has left while a command prints, typer turns that into an exit.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_output()
        return _BROKEN_PIPE_EXIT_CODE
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error))
            return 0
        context = getattr(error, "ctx", None)
        see = f" (see '{context.command_path} --help')" if context else ""
        return _refuse(cast("Any", error).format_message() + see)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            _discard_output()
            return _refuse(f"the output cannot be written ({error.strerror})")
        if not _is_users_mistake(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            return _refuse(f"{error.filename}: {error.strerror}")
        return _refuse(str(error))
    return code if isinstance(code, int) else 0


def _is_users_mistake(error: Exception) -> bool:
    """Return whether a user can correct ``error``: our own ``UserError`` and ``ValueError`` kinds, or a file.

    A bare ``ValueError`` is not: it was not raised for a user to read.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    is_ours = type(error).__module__.startswith(("eplb_core.", "eplb_lab.", "eplb_service."))
    return isinstance(error, UserError) or (is_ours and isinstance(error, ValueError))


def _discard_output() -> None:
    """Give stdout a place to go, so that what is left in its buffer raises nothing while Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    typer.echo(f"eplb: error: {' '.join(message.split())}", err=True)
    return _USAGE_EXIT_CODE


if __name__ == "__main__":
    main()
