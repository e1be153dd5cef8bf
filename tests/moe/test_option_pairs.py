"""Any two options of a layer together must leave it equal to its dense twin, with exact heat; on 1 to 8 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from eplb_service.wire.heat import StepPhase
from tests.moe.cases import Case, dealt_by_hand
from tests.moe.pairwise import Row, pairwise
from tests.moe.simulated import SimulatedGroup, run_simulated
from tests.solver.slow.stepwise import optimum
from worker_agent.moe import (
    Activation,
    DenseMoE,
    ExpertParallelMoE,
    LayerOptions,
    SharedExperts,
    seeded_experts,
)
from worker_agent.moe.dispatch import DISPATCHER_NAMES, SHARED_TOKEN_DISPATCHERS, MC2Variant
from worker_agent.moe.operators import reference
from worker_agent.moe.rank_group import RankGroup
from worker_agent.moe.shape import MoEShape
from worker_agent.moe.shared_experts import dense_shared_experts
from worker_agent.moe.weights import ExpertWeights, bias_dtype

OPTIONS: dict[str, list[Any]] = {
    "dispatcher": list(DISPATCHER_NAMES),
    "ranks": [1, 2, 3, 4, 5, 6, 7, 8],
    "kind": ["grouped", "W8A8", "slotwise", "batched"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "top_k": ["least", "some", "all"],
    "redundant": [False, True],
    "mask": ["none", "tokens", "choices", "one rank idle", "all idle"],
    "tokens": ["different", "one rank", "none"],
    "experts_weigh": [False, True],
    "weigh_on_input": [False, True],
    "quantize_before_gather": [False, True],
    "chunk_rows": [None, 2],
    "mc2": [
        MC2Variant(2),
        MC2Variant(2, a3=False),
        MC2Variant(1),
        MC2Variant(1, a3=False, hierarchical=True),
    ],
    "length": ["asked for", "longest", "longer"],
    "shared": ["none", "plain", "gated"],
    "check_ids": [True, False],
    "split": ["tables", "step"],
    "entries": [1, 2, 5],
    "activation": list(Activation),
    "biased": [False, True],
}
MOST_TOKENS = 5


def allowed(row: Row) -> bool:
    """Whether options, of which some may be missing, are meant to go together."""
    mc2 = row.get("dispatcher") == "mc2"
    if row.get("mc2", OPTIONS["mc2"][0]) != OPTIONS["mc2"][0] and row.get("dispatcher", "mc2") != "mc2":
        return False
    if row.get("dispatcher") == "moge" and (row.get("redundant") or row.get("split") == "step"):
        return False
    if row.get("quantize_before_gather") and (
        row.get("kind", "W8A8") != "W8A8" or row.get("dispatcher", "moge") not in SHARED_TOKEN_DISPATCHERS
    ):
        return False
    if row.get("weigh_on_input"):
        if row.get("top_k") not in (None, "least"):
            return False
        if row.get("dispatcher") == "moge" and row.get("ranks") not in (None, 1):
            return False
    # MC2's operators weigh in their combine; a batched layer has no room for longer padding.
    return not (mc2 and row.get("experts_weigh")) and not (
        row.get("length") == "longer" and row.get("kind") == "batched"
    )


@dataclass(frozen=True)
class Step:
    """One rank's call and what it must give."""

    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    active: torch.Tensor | None
    phase: StepPhase | None

    @property
    def real_TK(self) -> torch.Tensor:
        ids_TK = self.tokens[1]
        if self.phase is StepPhase.DUMMY:
            return torch.zeros_like(ids_TK, dtype=torch.bool)
        if self.active is None:
            return torch.ones_like(ids_TK, dtype=torch.bool)
        return self.active if self.active.ndim == 2 else self.active.unsqueeze(1).expand_as(ids_TK)

    @property
    def real_T(self) -> torch.Tensor:
        """Tokens whose outputs are not zeros by definition: a mask by choice leaves every token its shared experts."""
        if self.phase is StepPhase.DUMMY or (self.active is not None and self.active.ndim == 1):
            return self.real_TK.any(dim=1)
        return torch.ones(self.tokens[0].shape[0], dtype=torch.bool)


def case_of(row: Row, seed: int) -> Case:
    ranks = row["ranks"]
    slots = 3
    experts = ranks * slots - (1 if row["redundant"] and ranks > 1 else 0)
    grouped = row["dispatcher"] == "moge"
    least = ranks if grouped else 1
    top_k = {"least": least, "some": min(2 * least, experts), "all": experts}[row["top_k"]]
    counts = {
        "different": [(3 * rank + 2) % (MOST_TOKENS + 1) for rank in range(ranks)],
        "one rank": [MOST_TOKENS if rank == ranks - 1 else 0 for rank in range(ranks)],
        "none": [0] * ranks,
    }[row["tokens"]]
    return Case(
        row["dispatcher"],
        experts,
        slots,
        top_k,
        tuple(counts),
        skew=0.2,
        seed=seed,
        hidden=16,
        intermediate=12,
        dtype=row["dtype"],
        quantized=row["kind"] == "W8A8",
        entries=row["entries"],
        activation=row["activation"],
        biased=row["biased"],
    )


def step_of(case: Case, row: Row, rank: int) -> Step:
    tokens = case.step(rank)
    generator = torch.Generator().manual_seed(case.seed + rank)
    shape = {"tokens": (case.tokens[rank],), "choices": tuple(tokens[1].shape)}.get(row["mask"])
    active = None if shape is None else torch.rand(shape, generator=generator) < 0.5
    idle = row["mask"] == "all idle" or (row["mask"] == "one rank idle" and rank == 0)
    return Step(tokens, active, StepPhase.DUMMY if idle else None)


def shared_weights(case: Case, gated: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    shape = MoEShape(99, 1, case.hidden, case.intermediate, case.activation)
    w13_IH, w2_HI = seeded_experts(shape)(0)
    return (
        w13_IH.to(case.dtype),
        w2_HI.to(case.dtype),
        torch.linspace(-1, 1, case.hidden).to(case.dtype) if gated else None,
    )


def layer_of(case: Case, row: Row, group: RankGroup) -> ExpertParallelMoE:
    shared = None
    if row["shared"] != "none":
        w13_IH, w2_HI, gate_H = shared_weights(case, row["shared"] == "gated")
        weights = ExpertWeights(w13_IH.unsqueeze(0), w2_HI.unsqueeze(0))
        shared = SharedExperts(3, weights, reference, case.dtype, gate_H, case.activation)
    return ExpertParallelMoE(
        case.shape,
        case.placement(),
        seeded_experts(case.shape, case.seed),
        biases=case.biases,
        log2phy_E=case.tables()[group.rank],
        dispatcher=case.dispatcher,
        ep_group=group,
        heat_rows=2,
        quantized=case.quantized,
        dtype=case.dtype,
        check_ids=row["check_ids"],
        shared_experts=shared,
        options=LayerOptions(
            slotwise=row["kind"] == "slotwise",
            max_rank_tokens=MOST_TOKENS if row["kind"] == "batched" else None,
            experts_weigh=row["experts_weigh"],
            weigh_on_input=row["weigh_on_input"],
            quantize_before_gather=row["quantize_before_gather"],
            chunk_rows=row["chunk_rows"],
            mc2=row["mc2"],
            split=row["split"],
        ),
    )


def expected(case: Case, row: Row, step: Step) -> torch.Tensor:
    """The dense twin in float32; only real choices, with the shared experts of real tokens."""
    hidden_TH, ids_TK, weights_TK = step.tokens
    weights_TK = weights_TK * step.real_TK
    if row["weigh_on_input"]:
        hidden_TH, weights_TK = hidden_TH * weights_TK.to(hidden_TH.dtype), step.real_TK.float()
    experts = seeded_experts(case.shape, case.seed)
    biases = case.biases
    dense = DenseMoE(
        case.shape,
        lambda e: _rounded(experts(e), case.dtype),
        biases=None if biases is None else lambda e: _rounded(biases(e), bias_dtype(case.dtype)),
    )
    out_TH = dense(hidden_TH.float(), ids_TK, weights_TK)
    if row["shared"] != "none":
        w13_IH, w2_HI, gate_H = (
            None if part is None else part.float() for part in shared_weights(case, row["shared"] == "gated")
        )
        assert w13_IH is not None
        assert w2_HI is not None
        whole = dense_shared_experts(w13_IH, w2_HI, gate_H, case.activation)
        out_TH = out_TH + whole(step.tokens[0].float())
    return out_TH.masked_fill(~step.real_T.unsqueeze(1), 0.0)


def _rounded(
    weights: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return weights[0].to(dtype).float(), weights[1].to(dtype).float()


TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the norm of a step's outputs; quantized ones are held to ``QUANTIZED`` besides."""

QUANTIZED = 3e-2


@pytest.fixture(autouse=True)
def operators_find_simulated_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "named", SimulatedGroup.named)


ROWS = pairwise(OPTIONS, allowed)


def described(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_layer_with_these_options_equals_its_dense_twin(row: Row):
    case = case_of(row, seed=ROWS.index(row))
    length = {"asked for": None, "longest": max(case.tokens), "longer": MOST_TOKENS + 3}[row["length"]]

    def one_step(group: RankGroup) -> tuple[torch.Tensor, list[int], list[int]]:
        layer = layer_of(case, row, group)
        step = step_of(case, row, group.rank)
        out_TH = layer(*step.tokens, active=step.active, phase=step.phase, length=length)
        assert out_TH.dtype == case.dtype
        return out_TH, layer.moe_load[0].tolist(), layer.source_load[0].tolist()

    results = run_simulated(case.ranks, one_step)
    steps = [step_of(case, row, rank) for rank in range(case.ranks)]
    found = torch.cat([out_TH.float() for out_TH, _, _ in results])
    wanted = torch.cat([expected(case, row, step) for step in steps])
    tolerance = TOLERANCE[case.dtype] + (QUANTIZED if case.quantized else 0.0)
    assert (found - wanted).norm() <= tolerance * wanted.norm(), described(row)
    for (out_TH, _, _), step in zip(results, steps, strict=True):
        assert not out_TH[~step.real_T].any(), described(row)

    if row["split"] == "step":
        received_RS = np.array([received for _, received, _ in results])
        check_split(case, received_RS, np.array([source for _, _, source in results]).sum(axis=0))
        return
    received_P = np.zeros(case.ranks * case.slots, dtype=int)
    chosen = [step.tokens[1][step.real_TK].long() for step in steps]
    np.add.at(received_P, dealt_by_hand(case, chosen), 1)
    for chosen_N, (_, _, source) in zip(chosen, results, strict=True):
        assert source == torch.bincount(chosen_N, minlength=case.experts).tolist(), described(row)
    assert [received for _, received, _ in results] == received_P.reshape(case.ranks, -1).tolist()


def check_split(case: Case, received_RS: np.ndarray, counts_E: np.ndarray) -> None:
    """Every expert's tokens are received by its replicas, and no rank has two more than it must."""
    placement_RS = case.placement()
    received_E = np.bincount(placement_RS.ravel(), received_RS.ravel(), minlength=case.experts)
    np.testing.assert_array_equal(received_E, counts_E)
    assert received_RS.sum(axis=1).max() <= optimum(placement_RS, counts_E.astype(float)) + 1 + 1e-6


def test_every_allowed_pair_is_in_the_table():
    small = {"a": [1, 2, 3], "b": [1, 2], "c": [1, 2], "d": [1, 2]}
    rows = pairwise(small, lambda row: not (row.get("a") == 1 and row.get("b") == 2))
    names = list(small)
    met = {(x, row[x], y, row[y]) for row in rows for x in names for y in names if x < y}
    assert met == {
        (x, i, y, j)
        for x in names
        for y in names
        if x < y
        for i in small[x]
        for j in small[y]
        if (x, i, y, j) != ("a", 1, "b", 2)
    }
    assert len(rows) < 9
