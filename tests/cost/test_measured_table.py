"""A measured table gives the curve of the kernel that is named, and refuses what is no such table."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from eplb_core.cost.curve import CostCurve, CurveError
from eplb_core.cost.fit import curve_from_table
from tests.cost.curves import FUSED, H200, plain_rank_us


def rows(
    curve: CostCurve,
    dtype: str = "fp8_block",
    distribution: str = "uniform",
    scale: float = 1.0,
    more: int = 0,
):
    for ranks in (8, 16, 32, 64):
        for tokens in (4, 32, 256, 2048, 16384, 65536):
            slots, choices = 256 // ranks + more, tokens * 8 / ranks
            busy = max(1, min(slots, int(choices)))
            us = plain_rank_us(curve, [max(1, choices / busy)] * busy, tokens * 8)
            yield {
                "device": "NVIDIA H200",
                "kernel_source": "deepepmoe",
                "moe_dtype": dtype,
                "num_tokens": tokens,
                "hidden_size": 7168,
                "inter_size": 2048,
                "topk": 8,
                "num_experts": 256,
                "num_slots": slots * ranks,
                "moe_tp_size": 1,
                "moe_ep_size": ranks,
                "distribution": distribution,
                "latency": us * scale / 1e3,
            }


def table(path, *parts):
    parquet.write_table(pyarrow.Table.from_pylist([row for part in parts for row in part]), path)
    return path


def test_rows_of_even_tokens_give_the_kernels_curve(tmp_path):
    skewed = rows(H200, distribution="power_law_1.2", scale=9)
    curve = curve_from_table(table(tmp_path / "moe.parquet", rows(H200), skewed), "decode")
    assert curve.rank_us([1] * 8) == pytest.approx(H200.rank_us([1] * 8), rel=0.02)
    assert curve.slope_us == pytest.approx(H200.slope_us, rel=0.05)
    assert curve.phase == "decode"
    assert curve.batch_us == pytest.approx(0, abs=1e-6)
    assert "NVIDIA H200" in curve.source
    assert "deepepmoe" in curve.source


@pytest.mark.parametrize("distribution", ["uniform", "power_law_1.2_eplb"])
def test_what_each_token_of_the_batch_takes_is_said_from_a_slots_own(tmp_path, distribution):
    # Balanced ranks serve where no row is even; a redundant slot on each shares their tokens.
    parts = [rows(FUSED, distribution=distribution, more=more) for more in (0, 1)]
    skewed = rows(H200, distribution="power_law_1.2", scale=9)
    curve = curve_from_table(table(tmp_path / "moe.parquet", *parts, skewed))
    assert curve.batch_us == pytest.approx(FUSED.batch_us, rel=0.05)
    assert curve.slope_us == pytest.approx(FUSED.slope_us, rel=0.05)


def test_of_several_kernels_one_must_be_named(tmp_path):
    slower = CostCurve(40, 30, 12, 0.2)
    path = table(tmp_path / "moe.parquet", rows(H200), rows(slower, "bfloat16"))
    with pytest.raises(CurveError, match=r"of 2 such kernels, name one: .*bfloat16.*; .*fp8_block"):
        curve_from_table(path)
    curve = curve_from_table(path, moe_dtype="bfloat16")
    assert curve.read_us == pytest.approx(30, rel=0.1)
    with pytest.raises(CurveError, match="of 0 such kernels, name one: there is none"):
        curve_from_table(path, hidden_size=4096)


def test_what_is_no_such_table_is_refused(tmp_path):
    path = tmp_path / "other.parquet"
    parquet.write_table(pyarrow.table({"latency": np.ones(3)}), path)
    with pytest.raises(
        CurveError, match=r"no table of MoE kernels in parquet \(KeyError\('distribution'\)\)"
    ):
        curve_from_table(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(CurveError, match="no table of MoE kernels in parquet"):
        curve_from_table(path)
    broken = [row | {"latency": None} for row in rows(H200)]
    with pytest.raises(CurveError, match="TypeError"):
        curve_from_table(table(tmp_path / "gaps.parquet", broken, rows(H200)))
