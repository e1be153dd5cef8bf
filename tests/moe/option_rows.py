"""A layer's options, a table that covers every pair of them, and each row's layer, step and expected output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eplb_core.heat.phase import StepPhase
from eplb_lab.layer import Activation, DenseMoE, ExpertParallelMoE, LayerOptions, MicroBatch, seeded_experts
from eplb_lab.layer.dispatch import DISPATCHER_NAMES, SHARED_TOKEN_DISPATCHERS
from eplb_lab.layer.operators import reference
from eplb_lab.layer.weights import ExpertWeights
from tests.moe.cases import MC2_VARIANTS, Case, layer_on, shared_of, whole_of
from tests.moe.pairwise import Row, pairwise
from tests.moe.simulated import SimulatedGroup

OPTIONS: dict[str, list[Any]] = {
    "dispatcher": list(DISPATCHER_NAMES),
    "ranks": [1, 2, 3, 4, 5, 6, 7, 8],
    "kind": ["grouped", "W8A8", "batched"],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "top_k": ["least", "some", "all"],
    "redundant": [False, True],
    "mask": ["none", "tokens", "choices", "one rank idle", "all idle"],
    "tokens": ["different", "one rank", "none"],
    "weigh_on_input": [False, True],
    "quantize_before_gather": [False, True],
    "mc2": MC2_VARIANTS,
    "length": ["asked for", "longest", "longer"],
    "shared": ["none", "plain", "gated"],
    "check_ids": [True, False],
    "split": ["tables", "step"],
    "entries": [1, 2, 5],
    "activation": list(Activation),
    "biased": [False, True],
    "batches": [1, 2],
    "tensor_parallel": [1, 2],
}
MOST_TOKENS = 5


def allowed(row: Row) -> bool:
    """Return True if these options can be combined. Some options may be missing."""
    if row.get("mc2", OPTIONS["mc2"][0]) != OPTIONS["mc2"][0] and row.get("dispatcher", "mc2") != "mc2":
        return False
    if row.get("dispatcher") == "moge" and (row.get("redundant") or row.get("split") == "step"):
        return False
    if row.get("quantize_before_gather") and (
        row.get("kind", "W8A8") != "W8A8" or row.get("dispatcher", "moge") not in SHARED_TOKEN_DISPATCHERS
    ):
        return False
    if row.get("tensor_parallel", 1) > 1 and row.get("ranks", 2) % 2:
        return False
    if row.get("weigh_on_input"):
        if row.get("top_k") not in (None, "least"):
            return False
        if row.get("dispatcher") == "moge" and row.get("ranks") not in (None, 1):
            return False
    # A batched layer has no room for longer padding.
    return not (row.get("length") == "longer" and row.get("kind") == "batched")


@dataclass(frozen=True)
class Step:
    """The inputs to one rank's call. Ranks that share tokens have the same inputs."""

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
        """Mask of the tokens whose outputs may differ from zero.

        They include tokens whose choices are all masked, because shared experts still compute them.
        """
        if self.phase is StepPhase.DUMMY or (self.active is not None and self.active.ndim == 1):
            return self.real_TK.any(dim=1)
        return torch.ones(self.tokens[0].shape[0], dtype=torch.bool)

    def parts(self, batches: int) -> list[slice]:
        """Return the tokens of each micro-batch: all tokens, or two halves.

        The first half is longer if the number is odd.
        """
        tokens = self.tokens[0].shape[0]
        half = -(-tokens // batches)
        return [slice(half * batch, min(half * (batch + 1), tokens)) for batch in range(batches)]

    def batch(self, part: slice) -> MicroBatch:
        active = None if self.active is None else self.active[part]
        return MicroBatch(*(tensor[part] for tensor in self.tokens), active)


def case_of(row: Row, seed: int) -> Case:
    ranks = row["ranks"]
    slots = 3
    experts = ranks * slots - (1 if row["redundant"] and ranks > 1 else 0)
    grouped = row["dispatcher"] == "moge"
    least = ranks if grouped else 1
    top_k = {"least": least, "some": min(2 * least, experts), "all": experts}[row["top_k"]]
    shared = row["tensor_parallel"]
    groups = ranks // shared
    counts = {
        "different": [(3 * group + 2) % (MOST_TOKENS + 1) for group in range(groups)],
        "one rank": [MOST_TOKENS if group == groups - 1 else 0 for group in range(groups)],
        "none": [0] * groups,
    }[row["tokens"]]
    return Case(
        row["dispatcher"],
        experts,
        slots,
        top_k,
        tuple(count for count in counts for _ in range(shared)),
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
    rank -= rank % row["tensor_parallel"]
    tokens = case.step(rank)
    if rank // row["tensor_parallel"] % 2:
        # Ranks may have ids and weights of different dtypes.
        tokens = tokens[0], tokens[1].long(), tokens[2].double()
    generator = torch.Generator().manual_seed(case.seed + rank)
    shape = {"tokens": (case.tokens[rank],), "choices": tuple(tokens[1].shape)}.get(row["mask"])
    active = None if shape is None else torch.rand(shape, generator=generator) < 0.5
    idle = row["mask"] == "all idle" or (row["mask"] == "one rank idle" and rank == 0)
    return Step(tokens, active, StepPhase.DUMMY if idle else None)


def layer_of(case: Case, row: Row, group: SimulatedGroup) -> ExpertParallelMoE:
    shared = None if row["shared"] == "none" else shared_of(case, row["shared"] == "gated", reference)
    dp, tp = group.grid(row["tensor_parallel"])
    return layer_on(
        case,
        group,
        mc2_group=group.twin("mc2") if case.dispatcher == "mc2" else None,
        biases=case.biases,
        heat_rows=2,
        check_ids=row["check_ids"],
        shared_experts=shared,
        options=LayerOptions(
            tp_group=tp,
            dp_groups=[dp],
            max_rank_tokens=MOST_TOKENS if row["kind"] == "batched" else None,
            weigh_on_input=row["weigh_on_input"],
            quantize_before_gather=row["quantize_before_gather"],
            mc2=row["mc2"],
            split=row["split"],
        ),
    )


def length_of(case: Case, row: Row) -> int | None:
    """Return the common length of the ranks' micro-batches, or None if the ranks must exchange it."""
    longest = -(-max(case.tokens) // row["batches"])
    return {"asked for": None, "longest": longest, "longer": MOST_TOKENS + 3}[row["length"]]


def call(layer: ExpertParallelMoE, row: Row, step: Step, length: int | None) -> torch.Tensor:
    """Return the layer's outputs for all tokens of a step, run as one or two micro-batches."""
    if row["batches"] == 1:
        out_TH: torch.Tensor = layer(*step.tokens, active=step.active, phase=step.phase, length=length)
        return out_TH
    first, second = (step.batch(part) for part in step.parts(2))
    return torch.cat(layer.forward_two(first, second, phase=step.phase, length=length))


def sources(case: Case, row: Row, steps: Sequence[Step]) -> list[list[list[torch.Tensor]]]:
    """Return each rank's real choices per micro-batch, only for tokens whose source it is: ``[R][batches]``."""
    tp = row["tensor_parallel"]
    choices_by_rank: list[list[list[torch.Tensor]]] = []
    for rank, step in enumerate(steps):
        choices_by_batch = []
        for number, part in enumerate(step.parts(row["batches"])):
            ids_TK = step.tokens[1][part]
            real_TK = step.real_TK[part]
            whole = ids_TK.shape[0]
            if row["dispatcher"] == "mc2":
                length = length_of(case, row)
                parts = [rank_step.parts(row["batches"])[number] for rank_step in steps]
                whole = max(each.stop - each.start for each in parts) if length is None else length
            width = -(-max(whole, 1) // tp)
            own_tokens = slice(rank % tp * width, (rank % tp + 1) * width)
            choices_by_batch.append(ids_TK[own_tokens][real_TK[own_tokens]].long())
        choices_by_rank.append(choices_by_batch)
    return choices_by_rank


def expected(case: Case, row: Row, step: Step) -> torch.Tensor:
    """Return the dense twin's float32 output for the real choices, plus shared experts' output for the real tokens."""
    hidden_TH, ids_TK, weights_TK = step.tokens
    weights_TK = weights_TK * step.real_TK
    if row["weigh_on_input"]:
        hidden_TH, weights_TK = hidden_TH * weights_TK.to(hidden_TH.dtype), step.real_TK.float()
    experts = seeded_experts(case.shape, case.seed)
    biases = case.biases
    dense = DenseMoE(
        case.shape,
        lambda e: _rounded(experts(e), case.dtype),
        biases=biases and (lambda e: _rounded(biases(e), ExpertWeights.bias_dtype(case.dtype))),
    )
    out_TH = dense(hidden_TH.float(), ids_TK, weights_TK)
    if row["shared"] != "none":
        out_TH = out_TH + whole_of(case, row["shared"] == "gated")(step.tokens[0])
    return out_TH.masked_fill(~step.real_T.unsqueeze(1), 0.0)


def _rounded(
    weights: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return weights[0].to(dtype).float(), weights[1].to(dtype).float()


ROWS = pairwise(OPTIONS, allowed)
