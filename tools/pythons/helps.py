"""Check in one process that every ``eplb`` command prints its help, and print the number of commands."""

from __future__ import annotations

import contextlib
import io

from eplb_service.cli.main import COMMANDS, load_command, run


def main() -> None:
    """Run each command and subcommand with ``--help``. Exit with a message if one fails."""
    asked: list[list[str]] = []
    for top in COMMANDS:
        asked.append([top])
        asked += [[top, child] for child in getattr(load_command(top), "commands", {})]
    for name in asked:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = run([*name, "--help"])
        if code or "--help" not in said.getvalue():
            raise SystemExit(f"eplb {' '.join(name)} --help ended with {code}: {said.getvalue()[-500:]}")
    print(f"help of {len(asked)} commands")


if __name__ == "__main__":
    main()
