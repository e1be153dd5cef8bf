"""Entry point of ``eplb``: load and run a command, and report user errors in one line."""

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

# typer uses either its bundled click or the installed one. In both, this is the base class of usage errors.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

# gRPC logs a line for each connection without TLS. These lines would fill the service's log and clutter a command's
# error output. To debug gRPC, set this variable in the environment.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_USAGE_EXIT_CODE = 2
"""Exit code for mistakes that the user can correct: arguments, files, addresses."""
_INTERRUPT_EXIT_CODE = 130
"""Exit code after Ctrl-C, as in a shell."""
_BROKEN_PIPE_EXIT_CODE = 141
"""Exit code if the process reading the output has exited, as in a shell."""

_LAB = "eplb-lab"
"""Distribution that provides further commands through entry points."""
_ENTRY_POINTS = "eplb.commands"
_OFFLINE = "Recorded heat"
_SERVICE = "Service"
_OPERATE = "Operate a running service"
COMMANDS = {
    "demo": (_LAB, _SERVICE, "Run a service and live ranks on this machine and watch them balance."),
    "serve": ("serve", _SERVICE, "Run the control plane that agents connect to."),
    "solve": ("solve", _OFFLINE, "Compute a placement from recorded heat."),
    "replay": ("replay", _OFFLINE, "Replay the planner on a trace and score each policy."),
    "prove": ("prove", _OFFLINE, "Prove the gain from balancing, on a trace or for a deployment."),
    "sweep": ("sweep", _OFFLINE, "Replay many traces with many settings, and print one table."),
    "advise": ("advise", _OFFLINE, "Recommend settings, and report whether balancing pays off."),
    "bench": (_LAB, _OFFLINE, "Compare with vLLM's, vLLM-Ascend's and SGLang's balancers."),
    "calibrate": (
        "calibrate",
        _OFFLINE,
        "Fit a cost curve: the time that a rank's experts take for their tokens.",
    ),
    "trace": ("trace", _OFFLINE, "Inspect, record, convert, slice, or synthesise heat traces."),
    "warmup": ("warmup", _OFFLINE, "Compile the solver once, so that later commands start faster."),
    "deployments": ("operator", _OPERATE, "List the deployments."),
    "status": ("operator", _OPERATE, "Show a deployment: balance, agents, and the last decision."),
    "top": ("top", _OPERATE, "Watch a service live: balance, ranks, layers, and switches."),
    "history": ("operator", _OPERATE, "Show past plans with their promises and outcomes."),
    "placement": ("operator", _OPERATE, "Show or save the current placement."),
    "pause": ("operator", _OPERATE, "Pause planning for a deployment."),
    "resume": ("operator", _OPERATE, "Resume planning for a paused deployment."),
    "rebalance": ("operator", _OPERATE, "Make a decision now instead of at the next interval."),
    "lead": ("operator", _OPERATE, "Make a deployment's ranks follow this service again."),
    "forget": ("operator", _OPERATE, "Remove a deployment whose ranks are gone."),
}
"""Module in ``eplb_service.cli``, help section and summary of each command. Listing the commands does not import them.

The function or command group in the module has the same name as the command. ``_LAB`` in place of a module marks a
command that eplb-lab provides.
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
eplb prove --heat heat.zarr --ranks 8 --slots 5 --report proof.html
eplb prove my-deployment --address balancer:50551 --steps 2000
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
"""Examples for the commands' help texts. Each command shows the lines that begin with its name."""

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _LazyGroup(TyperGroup):
    """Command group that lists ``COMMANDS`` and imports a command's module only when the command is run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, _, summary) in COMMANDS.items():
            self.add_command(HelpCommand(name, help=summary))

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write each command with its summary, grouped by section."""
        for heading in (_OFFLINE, _SERVICE, _OPERATE):
            records = [(name, text) for name, (_, section, text) in COMMANDS.items() if section == heading]
            write_section(formatter, heading, records)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command, the loaded command, and its arguments."""
        name, placeholder, arguments = super().resolve_command(ctx, args)
        return name, placeholder and load_command(str(name)), arguments


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
    """Load an eplb-lab command through its entry point. Raises ``UserError`` if eplb-lab is not installed."""
    for entry_point in metadata.entry_points(group=_ENTRY_POINTS, name=name):
        return entry_point.load()
    raise UserError(f"eplb {name} is part of {_LAB}, which is not installed; run: pip install '{_LAB}[demo]'")


def _examples(name: str) -> str:
    """Return the help text with the command's examples, one per line."""
    lines = [line for line in EXAMPLES if f"{line} ".startswith(f"eplb {name} ")]
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(name="eplb", cls=_LazyGroup, rich_markup_mode=None)


def _print_version(requested: bool) -> None:
    if requested:
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
    """Run ``eplb`` with the arguments of the process, and exit with its exit code."""
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``eplb`` and return its exit code.

    User errors are reported in one line on stderr, and the result is ``_USAGE_EXIT_CODE``. Any other exception is a bug
    and propagates.

    Parameters
    ----------
    arguments
        Command-line arguments; by default those of the process.
    """
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="eplb", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT_CODE
    except (BrokenPipeError, SystemExit) as error:
        # typer converts a broken pipe, which occurs if the reader exits while a command is printing, to SystemExit.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_output()
        return _BROKEN_PIPE_EXIT_CODE
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error))
            return 0
        context = getattr(error, "ctx", None)
        see_help = f" (see '{context.command_path} --help')" if context else ""
        return _report_error(cast("Any", error).format_message() + see_help)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _DISK_FULL_ERRORS:
            _discard_output()
            return _report_error(f"the output cannot be written ({error.strerror})")
        if not _is_users_mistake(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            return _report_error(f"{error.filename}: {error.strerror}")
        return _report_error(str(error))
    return code if isinstance(code, int) else 0


def _is_users_mistake(error: Exception) -> bool:
    """Return True if the user can fix ``error``: an error with a file name, or one of this project's own errors.

    The project's own errors are ``UserError`` and its subclasses of ``ValueError``. A plain ``ValueError`` has no
    user-facing message, so it counts as a bug.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    is_ours = type(error).__module__.startswith(("eplb_core.", "eplb_lab.", "eplb_service."))
    return isinstance(error, UserError) or (is_ours and isinstance(error, ValueError))


def _discard_output() -> None:
    """Redirect stdout to the null device, so that flushing its buffer at exit does not raise."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(message: str) -> int:
    typer.echo(f"eplb: error: {' '.join(message.split())}", err=True)
    return _USAGE_EXIT_CODE


if __name__ == "__main__":
    main()
