"""Runs commands: with some arguments changed, as an option may be given only once; and those that are refused."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from eplb_service.cli import main


def eplb(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = main.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that is refused, which prints nothing else."""
    code, out, err = eplb(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("eplb: error: ")
    assert err.count("\n") == 1
    return err


def changed(good: Iterable[object], *changes: object) -> list[str]:
    """The arguments ``good``, each option with its value, but for those that ``changes`` give; these follow."""
    other = [str(part) for part in changes]
    names = {part.partition("=")[0] for part in other if part.startswith("--")}
    kept: list[str] = []
    keeping = True
    for part in map(str, good):
        if part.startswith("--"):
            keeping = part not in names
        if keeping:
            kept.append(part)
    return [*kept, *other]
