"""Helpers that run commands, check rejections and render tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from eplb_service.cli import main


def eplb(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    code = main.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must be rejected and return its error line, which must be the only output."""
    code, out, err = eplb(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("eplb: error: ")
    assert err.count("\n") == 1
    return err


def drawn(shown: RenderableType, width: int = 80) -> list[str]:
    """Return the lines as rendered on a terminal that is ``width`` columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines
