"""Parquet tables of MoE kernel times computed from a cost curve."""

from __future__ import annotations

import pyarrow
from pyarrow import parquet

from eplb_core.cost.curve import CostCurve
from tests.cost.curves import plain_rank_us


def rows(
    curve: CostCurve,
    dtype: str = "fp8_block",
    distribution: str = "uniform",
    scale: float = 1.0,
    extra_slots: int = 0,
):
    for ranks in (8, 16, 32, 64):
        for tokens in (4, 32, 256, 2048, 16384, 65536):
            slots = 256 // ranks + extra_slots
            choices = tokens * 8 / ranks
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


def table(path, *groups):
    parquet.write_table(pyarrow.Table.from_pylist([row for group in groups for row in group]), path)
    return path
