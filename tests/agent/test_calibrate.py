"""The agent's calibration program times the expert kernel over a grid of loads and rejects invalid tasks."""

from __future__ import annotations

import json

import pytest

from eplb_lab import calibrate
from eplb_lab.calibrate import _busy_slots, _measure, _Task


def test_every_grid_cell_is_timed():
    cells = list(_measure(_Task(hidden=16, inter=8, slots=4, tokens=[1, 8], repeats=2)))
    assert [(cell["busy"], cell["tokens"]) for cell in cells] == [(b, n) for b in (1, 2, 4) for n in (1, 8)]
    assert all(cell["us"] > 0 for cell in cells)
    assert _busy_slots(9) == (1, 2, 4, 9)


@pytest.mark.parametrize("fields", [{"dtype": "int4"}, {"device": "moon"}])
def test_a_task_that_cannot_be_measured_is_rejected_with_a_one_line_message(fields, monkeypatch, capsys):
    task = {"hidden": 8, "inter": 8, "slots": 2, "tokens": [1], **fields}
    monkeypatch.setattr("sys.argv", ["calibrate", json.dumps(task)])
    assert calibrate.main() == 2
    assert next(iter(fields.values())) in capsys.readouterr().err


def test_the_program_prints_a_line_for_each_cell(monkeypatch, capsys):
    task = {"hidden": 8, "inter": 8, "slots": 1, "tokens": [1, 2], "repeats": 1}
    monkeypatch.setattr("sys.argv", ["calibrate", json.dumps(task)])
    assert calibrate.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["busy"], line["tokens"]) for line in lines] == [(1, 1), (1, 2)]
