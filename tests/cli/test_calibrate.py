"""Tests of ``eplb calibrate``: curves fitted to this machine's kernel or to a table, and rejection of a poor fit."""

from __future__ import annotations

import re

from eplb_core.cost.curve import read_curve
from eplb_service.cli import calibrate
from eplb_service.cli.main import run
from tests.cli.published import checked_document
from tests.cost.curves import H200, plain_rank_us
from tests.cost.kernel_tables import rows, table


def test_a_table_is_converted_to_a_curve_file(tmp_path, capsys):
    path = table(tmp_path / "moe.parquet", rows(H200))
    out = tmp_path / "curve.json"
    assert run(["calibrate", "--table", str(path), "--phase", "decode", "--out", str(out)]) == 0
    assert read_curve(str(out)).phase == "decode"
    assert "median error" in capsys.readouterr().out


def _exact(task):
    for busy in (1, 2, 4, 8):
        for tokens in task["tokens"]:
            yield {"busy": busy, "tokens": tokens, "us": plain_rank_us(H200, [tokens] * busy)}


def test_this_machines_kernel_is_timed_for_a_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "_measured", _exact)
    out = tmp_path / "curve.json"
    assert run(["calibrate", "--hidden", "64", "--inter", "32", "--out", str(out), "--json"]) == 0
    printed = checked_document("calibrate", capsys.readouterr().out)
    assert printed["read_us"] == read_curve(str(out)).read_us
    assert printed["source"].startswith("calibrated: cpu")


def test_a_kernel_that_no_curve_fits_is_rejected_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    def rising(task):
        for at, cell in enumerate(_exact(task)):
            yield cell | {"us": cell["us"] * (1 + 9 * (at % 3))}

    monkeypatch.setattr(calibrate, "_measured", rising)
    out = tmp_path / "curve.json"
    assert run(["calibrate", "--hidden", "64", "--inter", "32", "--out", str(out)]) == 2
    assert re.search("no cost curve fits.*; leave the device idle", capsys.readouterr().err)
    assert not out.exists()
