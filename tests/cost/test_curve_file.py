"""Curves survive a round trip through a file, and unusable files are rejected with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eplb_core.cost.curve import CurveError, FitQuality, curve_document, read_curve, write_curves
from tests.cost.curves import FUSED, H200

FIT = FitQuality(28, 7, 0.02, 0.05, 0.09)


def test_curves_survive_a_round_trip(tmp_path):
    path = tmp_path / "curve.json"
    curves = (replace(H200, fit=FIT), replace(FUSED, phase="prefill", slope_us=0.1))
    write_curves(path, curves)
    assert [read_curve(f"{path}:{curve.phase}") for curve in curves] == list(curves)
    assert json.loads(path.read_bytes())["curves"] == [curve_document(curve) for curve in curves]


def test_a_curve_for_any_phase_matches_every_phase(tmp_path):
    path = tmp_path / "curve.json"
    write_curves(path, [replace(H200, phase="any")])
    assert read_curve(str(path)) == read_curve(f"{path}:decode")


def test_the_phase_is_required_if_a_file_has_several_phases(tmp_path):
    path = tmp_path / "curve.json"
    write_curves(path, [H200, replace(H200, phase="prefill")])
    with pytest.raises(CurveError, match=r"select one, as in .*curve.json:decode"):
        read_curve(str(path))
    write_curves(path, [H200])
    with pytest.raises(CurveError, match="no prefill curve, only decode"):
        read_curve(f"{path}:prefill")


def _document(**changes):
    curve = {"floor_us": 20, "read_us": 11.6, "launch_us": 5, "slope_us_per_token": 0.06} | changes
    return {"format": "eplb-cost-curves/1", "curves": [curve]}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"\xff", "is not a cost curve file"),
        ([], "is not a cost curve file"),
        ({**_document(), "more": 1}, "more: Unexpected"),
        ({"format": "other", "curves": []}, "format"),
        (_document(read_us=-1), "read_us"),
        (_document(slope=1), "slope: Unexpected keyword"),
        (_document(read_us=0, launch_us=0, slope_us_per_token=0), "tokens cost nothing"),
        (
            _document(
                fit={"samples": 9, "held_out": 3, "median_error": 0.3, "p90_error": 0.5, "worst_error": 0.6}
            ),
            "does not fit",
        ),
        ({**_document(), "curves": _document()["curves"] * 2}, "has curves for any, any"),
    ],
)
def test_a_file_without_usable_curves_is_rejected(tmp_path, document, reason):
    path = tmp_path / "curve.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    with pytest.raises(CurveError, match=reason):
        read_curve(str(path))
