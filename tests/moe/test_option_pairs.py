"""Tests that a layer with any two options matches its dense twin and counts heat exactly, on 1 to 8 ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from eplb_lab.layer.dispatch import SHARED_TOKEN_DISPATCHERS
from tests.moe.cases import MC2_VARIANTS, Case, dealt_by_hand
from tests.moe.option_rows import (
    OPTIONS,
    ROWS,
    Step,
    allowed,
    call,
    case_of,
    expected,
    layer_of,
    length_of,
    sources,
    step_of,
)
from tests.moe.pairwise import Row
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.solver.slow.stepwise import optimum

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Tolerance relative to the norm of a step's outputs. Quantised outputs may differ by an additional ``QUANTIZED``."""

QUANTIZED = 3e-2


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_layer_with_these_options_equals_its_dense_twin(row: Row):
    case = case_of(row, seed=ROWS.index(row))

    def one_step(group: SimulatedGroup) -> tuple[torch.Tensor, list[int], list[int]]:
        layer = layer_of(case, row, group)
        out_TH = call(layer, row, step_of(case, row, group.rank), length_of(case, row))
        assert out_TH.dtype == case.dtype
        assert int(layer.load_counter) == 1
        return out_TH, layer.moe_load[0].tolist(), layer.source_load[0].tolist()

    results = run_simulated(case.ranks, one_step)
    steps = [step_of(case, row, rank) for rank in range(case.ranks)]
    outputs_TH = torch.cat([out_TH.float() for out_TH, _, _ in results])
    expected_TH = torch.cat([expected(case, row, step) for step in steps])
    tolerance = TOLERANCE[case.dtype] + (QUANTIZED if case.quantized else 0.0)
    assert (outputs_TH - expected_TH).norm() <= tolerance * expected_TH.norm(), row
    for (out_TH, _, _), step in zip(results, steps, strict=True):
        assert not out_TH[~step.real_T].any(), row

    chosen = sources(case, row, steps)
    for rank_choices, (_, _, source) in zip(chosen, results, strict=True):
        assert source == torch.bincount(torch.cat(rank_choices), minlength=case.experts).tolist(), row
    received_RS = np.array([received for _, received, _ in results])
    if row["split"] == "step":
        check_split(case, received_RS, chosen)
    else:
        check_dealing(case, row, received_RS, steps, chosen)


def check_dealing(
    case: Case, row: Row, received_RS: np.ndarray, steps: list[Step], chosen: list[list[torch.Tensor]]
) -> None:
    """Check that each choice arrives in the slot given by its source's table, in micro-batch order."""
    by_source = [torch.cat(rank_choices) for rank_choices in chosen]
    if case.dispatcher in SHARED_TOKEN_DISPATCHERS:
        # All ranks together form one source, and micro-batches follow one another. Some ranks have the same tokens.
        parts = [
            (step, step.parts(row["batches"])[number])
            for number in range(row["batches"])
            for step in steps[:: row["tensor_parallel"]]
        ]
        by_source = [torch.cat([step.tokens[1][part][step.real_TK[part]].long() for step, part in parts])]
    received_P = np.zeros(case.ranks * case.slots, dtype=int)
    np.add.at(received_P, dealt_by_hand(case, by_source), 1)
    assert received_RS.ravel().tolist() == received_P.tolist()


def check_split(case: Case, received_RS: np.ndarray, chosen: list[list[torch.Tensor]]) -> None:
    """Check that all tokens arrive, and that no rank exceeds the optimum by more than one token per micro-batch."""
    placement_RS = case.placement()
    by_batch = [torch.cat(parts) for parts in zip(*chosen, strict=True)]
    counts_BE = np.array([torch.bincount(ids, minlength=case.experts).numpy() for ids in by_batch])
    received_E = np.bincount(placement_RS.ravel(), received_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(received_E, counts_BE.sum(axis=0))
    load_limit = sum(optimum(placement_RS, counts_E.astype(float)) + 1 + 1e-6 for counts_E in counts_BE)
    assert received_RS.sum(axis=1).max() <= load_limit


def test_the_table_has_every_allowed_pair_of_options():
    names = list(OPTIONS)
    every = [
        {first: x, second: y}
        for first, second in itertools.combinations(names, 2)
        for x, y in itertools.product(OPTIONS[first], OPTIONS[second])
    ]
    missing = [pair for pair in every if not any(pair.items() <= row.items() for row in ROWS)]
    # These pairs look allowed, but no row can contain them, because the two options require different dispatchers.
    assert [pair for pair in missing if allowed(pair)] == [
        {"quantize_before_gather": True, "mc2": variant} for variant in MC2_VARIANTS[1:]
    ]
    assert len(missing) < len(every) / 50
