"""Random but reproducible placements, tables and tokens, and helpers that run one layer on some of the ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.placement import Int32, Placement, with_entries, without_single_entries
from eplb_lab.layer import (
    Activation,
    DenseMoE,
    ExpertParallelMoE,
    ExpertSource,
    MoEShape,
    SharedExperts,
    seeded_experts,
)
from eplb_lab.layer.compose import LayerOptions
from eplb_lab.layer.dispatch import SHARED_TOKEN_DISPATCHERS, MC2Variant
from eplb_lab.layer.operators import Operators, reference
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.router import grouped_routing
from eplb_lab.layer.shared_experts import SharedModule
from eplb_lab.layer.weights import ExpertWeights

_groups: dict[int, dist.ProcessGroup | None] = {}

MC2_VARIANTS = [MC2Variant(), MC2Variant(a3=False), MC2Variant(a3=False, hierarchical=True)]


@dataclass(frozen=True)
class Case:
    """One layer, its placement, and the tokens of one step for each of the first ``len(tokens)`` ranks."""

    dispatcher: str
    experts: int
    slots: int
    top_k: int
    tokens: tuple[int, ...]
    skew: float = 1.0
    seed: int = 0
    hidden: int = 8
    intermediate: int = 6
    dtype: torch.dtype = torch.float32
    quantized: bool = False
    entries: int = 1
    activation: Activation = Activation.SILU
    biased: bool = False

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> MoEShape:
        return MoEShape(3, self.experts, self.hidden, self.intermediate, self.activation)

    @property
    def biases(self) -> ExpertSource | None:
        weights = seeded_experts(self.shape, self.seed + 1)
        return (lambda expert: tuple(weight[:, 0] for weight in weights(expert))) if self.biased else None

    def dense(self) -> DenseMoE:
        """Return the dense twin, whose outputs the layer must match."""
        return DenseMoE(self.shape, seeded_experts(self.shape, self.seed), dtype=self.dtype)

    def placement(self, draw: int = 0) -> Int32:
        """Return a random valid placement ``[R, S]``, seeded by ``draw``. Grouped experts stay on their rank."""
        rng = np.random.default_rng((self.seed, draw))
        if self.dispatcher == "moge":
            groups_RS = np.arange(self.experts, dtype=np.int32).reshape(self.ranks, self.slots)
            return rng.permuted(groups_RS, axis=1)
        order = rng.permutation(self.ranks * self.slots)
        flat = np.full(self.ranks * self.slots, -1, dtype=np.int32)
        flat[order[: self.experts]] = rng.permutation(self.experts)
        phy2log_RS = flat.reshape(self.ranks, self.slots)
        for rank, slot in np.argwhere(phy2log_RS < 0):
            absent = np.setdiff1d(np.arange(self.experts), phy2log_RS[rank])
            phy2log_RS[rank, slot] = rng.choice(absent)
        return phy2log_RS

    def tables(self, draw: int = 0) -> Int32:
        """Return random valid log2phy tables, which are equal on all ranks if the dispatcher requires it.

        The shape is ``[R, E]``, or ``[R, E, D]`` for dealing tables with several entries.
        """
        rng = np.random.default_rng((self.seed, draw, 1))
        flat = self.placement(draw).ravel()
        tables_RE = [
            [rng.choice(np.flatnonzero(flat == expert), self.entries) for expert in range(self.experts)]
            for _ in range(self.ranks)
        ]
        if self.dispatcher in SHARED_TOKEN_DISPATCHERS:
            tables_RE = [tables_RE[0]] * self.ranks
        return without_single_entries(np.array(tables_RE, dtype=np.int32))

    def step(self, rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the hidden states, top-k ids (int32) and router weights of a rank's tokens in a step."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step * 100 + rank)
        count = self.tokens[rank]
        hidden_TH = torch.randn(count, self.hidden, generator=generator)
        popularity_E = -self.skew * torch.arange(self.experts).float()
        logits_TE = torch.randn(count, self.experts, generator=generator) + popularity_E
        if self.dispatcher == "moge":
            weights_TK, ids_TK = grouped_routing(self.ranks)(logits_TE, self.top_k)
        else:
            weights_TK, ids_TK = logits_TE.topk(self.top_k)
        return hidden_TH.to(self.dtype), ids_TK.to(torch.int32), weights_TK.softmax(-1)


def shared_weights(case: Case, gated: bool = False) -> tuple[ExpertWeights, torch.Tensor | None]:
    """Return shared experts with the width and dtype of the case's experts, and their gate if ``gated``."""
    w13_IH, w2_HI = seeded_experts(replace(case, experts=1).shape, seed=99)(0)
    weights = ExpertWeights(w13_IH.unsqueeze(0).to(case.dtype), w2_HI.unsqueeze(0).to(case.dtype))
    return weights, torch.linspace(-1, 1, case.hidden).to(case.dtype) if gated else None


def shared_of(
    case: Case, gated: bool = False, operators: Operators | None = None, quantization: str = "none"
) -> SharedExperts:
    """Return the case's shared experts in two parts."""
    weights, gate_H = shared_weights(case, gated)
    operators = reference if operators is None else operators
    return SharedExperts(
        3,
        weights,
        operators,
        case.dtype,
        gate_H=gate_H,
        activation=case.activation,
        quantization=quantization,
    )


def whole_of(case: Case, gated: bool = False) -> SharedModule:
    """Return the case's unsplit shared experts in float32, as a dense layer of one expert."""
    weights, gate_H = shared_weights(case, gated)
    dense = DenseMoE(replace(case, experts=1).shape, lambda _: (weights.w13_SIH[0], weights.w2_SHI[0]))

    def whole(hidden_TH: torch.Tensor) -> torch.Tensor:
        hidden_TH = hidden_TH.float()
        weight_T1 = torch.ones(len(hidden_TH), 1)
        if gate_H is not None:
            weight_T1 = torch.sigmoid(hidden_TH @ gate_H.float()).unsqueeze(1)
        out_TH: torch.Tensor = dense(hidden_TH, torch.zeros(weight_T1.shape).int(), weight_T1)
        return out_TH

    return whole


def ep_group(ranks: int) -> dist.ProcessGroup | None:
    """Return the group of the first ``ranks`` ranks, created once per process, or ``None`` for one rank.

    All ranks must call it together.
    """
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(range(ranks))) if ranks > 1 else None
    return _groups[ranks]


def build_on(
    case: Case, group: RankGroup, heat_rows: int = 4
) -> tuple[ExpertParallelMoE, DenseMoE | ExpertParallelMoE]:
    """Return the case's layer and its reference.

    The reference is the dense twin, or the same layer on one rank if its weights are quantised.
    """
    layer = layer_on(case, group, heat_rows=heat_rows)
    if case.quantized:
        return layer, alone(case)
    return layer, case.dense()


def layer_on(case: Case, group: RankGroup, **more: Any) -> ExpertParallelMoE:
    """Build the case's layer on one rank of a group. Arguments in ``more`` override the case's arguments."""
    arguments = {
        "phy2log_RS": case.placement(),
        "log2phy_E": case.tables()[group.rank],
        "dispatcher": case.dispatcher,
        "quantization": "w8a8" if case.quantized else "none",
        "dtype": case.dtype,
        "ep_group": group,
    }
    arguments["experts"] = seeded_experts(case.shape, case.seed)
    return ExpertParallelMoE(case.shape, **(arguments | more))


def in_order(experts: int) -> Int32:
    """Return the placement of all experts on one rank, ``[1, E]``."""
    return Placement.linear(1, experts, 1, experts).phy2log_LRS[0]


def alone(case: Case, options: LayerOptions | None = None, **more: Any) -> ExpertParallelMoE:
    """Return the case's layer on one rank, with expert ``e`` in slot ``e``."""
    arguments = {"phy2log_RS": in_order(case.experts), "log2phy_E": None, "options": options}
    return layer_on(case, RankGroup(None), **(arguments | more))


def dealt_by_hand(case: Case, chosen: list[torch.Tensor], draw: int = 0) -> list[int]:
    """Return the physical slots for all ranks' real choices, using each source's table entries in turn.

    ``chosen`` lists each rank's experts in token order. Ranks that share tokens are one source.
    """
    tables_RED = with_entries(case.tables(draw), 2)
    shared = case.dispatcher in SHARED_TOKEN_DISPATCHERS
    turns: Counter[tuple[int, int]] = Counter()
    slots = []
    for rank, ids in enumerate(chosen):
        for expert in ids.flatten().tolist():
            source = (0 if shared else rank), expert
            slots.append(int(tables_RED[rank, expert, turns[source] % case.entries]))
            turns[source] += 1
    return slots


def hand_counts(
    case: Case, step: int = 0, draw: int = 0, active: list[torch.Tensor] | None = None
) -> tuple[Int32, Int32]:
    """Return the tokens that each slot receives, ``[R, S]``, and that each rank sends per logical expert, ``[R, E]``.

    ``active`` marks each rank's real tokens, bool ``[T]``.
    """
    source_RE = np.zeros((case.ranks, case.experts), dtype=np.int32)
    received_P = np.zeros(case.ranks * case.slots, dtype=np.int32)
    chosen = []
    for rank in range(case.ranks):
        ids_TK = case.step(rank, step)[1]
        chosen.append(ids_TK if active is None else ids_TK[active[rank]])
        for expert in chosen[rank].flatten().tolist():
            source_RE[rank, expert] += 1
    for slot in dealt_by_hand(case, chosen, draw):
        received_P[slot] += 1
    return received_P.reshape(case.ranks, case.slots), source_RE
