"""Long work that Ctrl-C stops and the same command goes on with: what is left behind, and how that is said."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_service.atomic_write import check_output

if TYPE_CHECKING:
    from eplb_service.io.trace import Trace
    from eplb_service.replay.jobs import Job, Ledger, Scene

ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="State file (.npz): continue from what Ctrl-C left there, or leave it there. Removed once all is done.",
    ),
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores by default.")]


class Resumable:
    """The state of one command's work, round by round.

    Parameters
    ----------
    path
        Its file, as ``--resume`` names it; ``None`` for a name of its own, where it is needed.

    Raises ``OutputError`` where no file can be written there, ``ReplayError`` where one is there that is no state.
    """

    def __init__(self, path: Path | None) -> None:
        from eplb_service.replay.state_file import SUFFIX, SavedState

        self._path = path
        self._saved = None
        if path is not None:
            check_output(path, (SUFFIX,))
            self._saved = SavedState(path) if path.exists() else None
        self._rounds: list[tuple[str, Ledger]] = []

    def ledger(self, jobs: Sequence[Job], trace: Trace, scene: Scene) -> Ledger:
        """Of the next round, with what was found of it before; raises ``ReplayError`` where the file is of others."""
        from eplb_service.replay.jobs import Ledger
        from eplb_service.replay.state_file import fingerprint

        name = fingerprint(jobs, trace, scene)
        number = len(self._rounds)
        ledger = Ledger(jobs) if self._saved is None else self._saved.ledger(number, name, jobs, trace, scene)
        self._rounds.append((name, ledger))
        return ledger

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, Ctrl-C leaves the state behind before it passes through."""
        try:
            yield
        except KeyboardInterrupt:
            self.leave()
            raise

    def leave(self) -> None:
        """Write what has been found, and say how to go on."""
        from eplb_service.replay.state_file import SUFFIX, save_state

        decisions = sum(ledger.decisions for _, ledger in self._rounds)
        if not decisions:
            return
        path = self._path or Path(f"eplb-{self._rounds[0][0][:8]}{SUFFIX}")
        save_state(path, self._rounds)
        typer.echo(
            f"eplb: stopped; {decisions} decisions are kept in {path}. Go on with:\n"
            f"  {command()} --resume {shlex.quote(str(path))}",
            err=True,
        )

    def finish(self) -> None:
        """All is done: the state is of no use any more."""
        if self._saved is not None and self._path is not None:
            self._path.unlink(missing_ok=True)


def command() -> str:
    """The command that was called, to be called again from the beginning: without ``--resume``."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--resume":
            next(arguments, None)
        elif not argument.startswith("--resume="):
            kept.append(shlex.quote(argument))
    return " ".join(["eplb", *kept])
