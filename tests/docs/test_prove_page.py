"""The command on the page about proofs runs verbatim and prints the arms that the page shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from eplb_service.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "prove.md").read_text()


def arms(table: str) -> list[str]:
    return re.findall(r"^ (\w[\w ]*?) +\d\.\d{3} ", table, re.MULTILINE)


def test_the_command_prints_the_arms_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DOCS / "tutorial" / "trace.zarr", tmp_path / "trace.zarr")
    monkeypatch.chdir(tmp_path)
    [(command, shown)] = re.findall(r"```sh\n(.*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert main.run(shlex.split(command)[1:]) == 0
    assert arms(shown) == ["off", "deepseek", "ours", "forced balance"] == arms(capsys.readouterr().out)
    assert "<h1>Proof for trace.zarr</h1>" in (tmp_path / "proof.html").read_text()
