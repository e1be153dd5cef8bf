"""One rank process of the demo: ``python -m eplb_lab.ranks.rank TASK.json RANK``.

Every step runs the same routed tokens, whose expert choices are exactly those that a heat trace counted, through two
sets of layers with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eplb_core.placement import Placement
from eplb_lab.layer import ExpertParallelMoE, LayerOptions, MoEShape, seeded_experts
from eplb_lab.ranks.twins import Task, Twins, run


@dataclass(frozen=True, kw_only=True)
class _DemoTask(Task):
    """Serve the heat in the ``.npy`` file ``counts``, int ``[T, L, E]``, by experts of this H and I."""

    counts: str
    hidden: int
    intermediate: int


class _DemoRank:
    """Both sets of layers, and the agent of one."""

    def __init__(self, task: _DemoTask, rank: int, group: dist.ProcessGroup) -> None:
        self._task, self._rank, self._group = task, rank, group
        self._counts_TLE = np.load(task.counts)
        self._top_k = choices_per_token(self._counts_TLE)
        _, layers, experts = self._counts_TLE.shape
        placement = Placement.linear(layers, experts, task.ranks, task.slots)
        self._live = [self._layer(layer, placement, task.split) for layer in range(layers)]
        self._still = [self._layer(layer, placement, "tables") for layer in range(layers)]
        self._twins = Twins(task, rank, group, self._live, self._still)

    def serve(self) -> None:
        self._twins.serve(len(self._counts_TLE), self._one_step)

    def _layer(self, layer: int, placement: Placement, split: str) -> ExpertParallelMoE:
        shape = MoEShape(layer, placement.experts, self._task.hidden, self._task.intermediate)
        return ExpertParallelMoE(
            shape,
            placement.phy2log_LRS[layer],
            seeded_experts(shape, self._task.seed),
            dispatcher=self._task.dispatcher,
            ep_group=self._group,
            options=LayerOptions(split=split),
            dealing_width=self._task.dealing_width,
        )

    def _one_step(self, step: int) -> dict[str, object]:
        routed = [self._routed(step, layer) for layer in range(len(self._live))]
        # The most tokens that start on any rank.
        lengths = [
            -(-int(counts_E.sum()) // (self._top_k * self._task.ranks)) for counts_E in self._counts_TLE[step]
        ]

        def outputs(layers: Sequence[ExpertParallelMoE]) -> list[torch.Tensor]:
            given = zip(layers, routed, lengths, strict=True)
            return [layer(*tokens, length=length) for layer, tokens, length in given]

        live, still, times = self._twins.by_turns(
            step, len(routed[0][1]), lambda: outputs(self._live), lambda: outputs(self._still)
        )
        for one, other in zip(live, still, strict=True):
            self._twins.compare(one, other)
        return times

    def _routed(self, step: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens of this rank in one layer: hidden ``[T, H]``, expert ids and weights ``[T, K]``."""
        rng = np.random.default_rng([self._task.seed, step, layer])
        ids_TK = own_part(deal(self._counts_TLE[step, layer], self._top_k, rng), self._rank, self._task.ranks)
        own = np.random.default_rng([self._task.seed, step, layer, self._rank])
        hidden_TH = own.standard_normal((ids_TK.shape[0], self._task.hidden), dtype=np.float32)
        weights_TK = own.random(ids_TK.shape, dtype=np.float32) + 0.1
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        return torch.from_numpy(hidden_TH), torch.from_numpy(ids_TK), torch.from_numpy(weights_TK)


def choices_per_token(counts_TLE: npt.NDArray[np.integer], most: int = 8) -> int:
    """Largest top-k, up to ``most``, with which every step of the trace could have been routed.

    That is: the choices of each step and layer divide into tokens of ``k`` distinct experts each. 1 always will do.
    """
    sums_TL = counts_TLE.sum(axis=2)
    hottest_TL = counts_TLE.max(axis=2)
    for top_k in range(most, 1, -1):
        if (sums_TL % top_k == 0).all() and (hottest_TL * top_k <= sums_TL).all():
            return top_k
    return 1


def deal(counts_E: npt.NDArray[np.integer], top_k: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Expert choices ``[tokens, top_k]``, distinct within a token, that count up to ``counts_E``.

    Choices are laid out in order of expert and dealt round the tokens like cards, so that an expert with no more
    choices than there are tokens never meets the same token twice; then the tokens are shuffled.
    """
    choices = np.repeat(np.arange(counts_E.shape[0]), counts_E)
    tokens = choices.shape[0] // top_k
    dealt_TK = choices.reshape(top_k, tokens).T
    return np.ascontiguousarray(rng.permutation(dealt_TK))


def own_part(choices_TK: npt.NDArray[np.int64], rank: int, ranks: int) -> npt.NDArray[np.int64]:
    """Tokens that start on ``rank``: a nearly equal, contiguous part."""
    bounds = np.arange(ranks + 1) * choices_TK.shape[0] // ranks
    return choices_TK[bounds[rank] : bounds[rank + 1]]


if __name__ == "__main__":
    run(_DemoTask, _DemoRank)
