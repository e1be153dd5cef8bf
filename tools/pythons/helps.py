"""Check in one process that every ``eplb`` command prints its help, and print the number of commands."""

from __future__ import annotations

import contextlib
import io

from eplb_service.cli.main import COMMANDS, load_command, run


def main() -> None:
    """Run each command and subcommand with ``--help``. Exit with a message if one fails."""
    command_names: list[list[str]] = []
    for top in COMMANDS:
        command_names.append([top])
        command_names += [[top, child] for child in getattr(load_command(top), "commands", {})]
    for name in command_names:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = run([*name, "--help"])
        if code or "--help" not in output.getvalue():
            raise SystemExit(
                f"eplb {' '.join(name)} --help exited with code {code}: {output.getvalue()[-500:]}"
            )
    print(f"help of {len(command_names)} commands")


if __name__ == "__main__":
    main()
