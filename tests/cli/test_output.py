"""Tests of output: numpy values become JSON values, NaN becomes null, and figures are printed without exponents."""

import json

import numpy as np
import pytest

from eplb_core.figures import digits, size_text
from eplb_service.cli.output import print_json, to_json, write_json

DOCUMENT = {"par": np.float64(1.5), "moves": np.int32(3), "par_L": np.array([1.0, 2.0]), "name": "x"}
PLAIN = {"par": 1.5, "moves": 3, "par_L": [1.0, 2.0], "name": "x"}


def test_numpy_values_become_json_values(tmp_path, capsys):
    path = tmp_path / "out.json"
    write_json(path, DOCUMENT)
    print_json(DOCUMENT)
    assert json.loads(path.read_text()) == PLAIN
    assert json.loads(capsys.readouterr().out) == PLAIN


def test_nan_becomes_null_and_infinity_is_rejected():
    document = json.loads(to_json({"par": float("nan"), "par_L": np.array([1.5, np.nan])}))
    assert document == {"par": None, "par_L": [1.5, None]}
    with pytest.raises(ValueError, match="Out of range"):
        to_json({"par": np.float64("inf")})


def test_a_figure_has_three_significant_digits_and_no_exponent():
    shown = {3754.2: "3,750", 4.12e-5: "0.0000412", 1e12: "1,000,000,000,000", -0.0: "0", float("nan"): "-"}
    assert {value: digits(value) for value in shown} == shown
    assert [digits(3754.2, 2, "+"), digits(-0.25, sign="+")] == ["+3,800", "-0.25"]
    assert [size_text(size) for size in (0, 999.6, 16 << 20, 4e18)] == ["0 B", "1 kB", "16.8 MB", "4,000 PB"]
