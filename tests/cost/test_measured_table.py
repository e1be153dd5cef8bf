"""A measured table yields the curve of the selected kernel, and files that contain no such table are rejected."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from eplb_core.cost.curve import CostCurve, CurveError
from eplb_core.cost.fit import curve_from_table
from tests.cost.curves import FUSED, H200
from tests.cost.kernel_tables import rows, table


def test_rows_with_evenly_spread_tokens_give_the_curve_of_the_kernel(tmp_path):
    skewed = rows(H200, distribution="power_law_1.2", scale=9)
    curve = curve_from_table(table(tmp_path / "moe.parquet", rows(H200), skewed), "decode")
    assert curve.rank_us([1] * 8) == pytest.approx(H200.rank_us([1] * 8), rel=0.02)
    assert curve.slope_us == pytest.approx(H200.slope_us, rel=0.05)
    assert curve.phase == "decode"
    assert curve.batch_us == pytest.approx(0, abs=1e-6)
    assert "NVIDIA H200" in curve.source
    assert "deepepmoe" in curve.source


@pytest.mark.parametrize("distribution", ["uniform", "power_law_1.2_eplb"])
def test_the_batch_term_is_distinguished_from_the_slope(tmp_path, distribution):
    # Rows with balanced ranks are used if there are no even rows. Redundant slots reduce the tokens per slot.
    groups = [rows(FUSED, distribution=distribution, extra_slots=extra) for extra in (0, 1)]
    skewed = rows(H200, distribution="power_law_1.2", scale=9)
    curve = curve_from_table(table(tmp_path / "moe.parquet", *groups, skewed))
    assert curve.batch_us == pytest.approx(FUSED.batch_us, rel=0.05)
    assert curve.slope_us == pytest.approx(FUSED.slope_us, rel=0.05)


def test_one_of_several_kernels_must_be_selected(tmp_path):
    slower = CostCurve(40, 30, 12, 0.2)
    path = table(tmp_path / "moe.parquet", rows(H200), rows(slower, "bfloat16"))
    with pytest.raises(CurveError, match=r"has 2 matching kernels .*: .*bfloat16.*; .*fp8_block"):
        curve_from_table(path)
    curve = curve_from_table(path, moe_dtype="bfloat16")
    assert curve.read_us == pytest.approx(30, rel=0.1)
    with pytest.raises(CurveError, match=r"has no matching kernel .* for {'hidden_size': 4096}"):
        curve_from_table(path, hidden_size=4096)


def test_files_without_a_measured_table_are_rejected(tmp_path):
    path = tmp_path / "other.parquet"
    parquet.write_table(pyarrow.table({"latency": np.ones(3)}), path)
    with pytest.raises(
        CurveError, match=r"is not a Parquet table of MoE kernels \(KeyError\('distribution'\)\)"
    ):
        curve_from_table(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(CurveError, match="is not a Parquet table of MoE kernels"):
        curve_from_table(path)
    broken = [row | {"latency": None} for row in rows(H200)]
    with pytest.raises(CurveError, match="TypeError"):
        curve_from_table(table(tmp_path / "gaps.parquet", broken, rows(H200)))
