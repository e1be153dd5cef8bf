"""Rank process of the demo that serves a trace: ``python -m eplb_lab.ranks.rank TASK.json RANK``.

In each step, random tokens are routed so that the number of choices of each expert matches the trace exactly. The same
tokens run through two sets of layers with the same weights.
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
    """Task for ranks that serve a trace; see ``_DemoRank``.

    Parameters
    ----------
    counts
        ``.npy`` file with the heat, int ``[T, L, E]``.
    hidden
        H, the hidden size of the layers.
    intermediate
        I, the intermediate size of the experts.
    """

    counts: str
    hidden: int
    intermediate: int


class _DemoRank:
    """Rank with balanced layers, and with copies of them that keep the initial layout."""

    def __init__(self, task: _DemoTask, rank: int, group: dist.ProcessGroup) -> None:
        self._task = task
        self._rank = rank
        self._group = group
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
        """Run one step of both sets of layers, compare their outputs, and return the fields of the step's report."""
        routed = [self._routed(step, layer) for layer in range(len(self._live))]
        # Largest number of tokens on any rank, per layer. ``own_part`` divides the tokens nearly equally.
        lengths = [
            -(-int(counts_E.sum()) // (self._top_k * self._task.ranks)) for counts_E in self._counts_TLE[step]
        ]

        def outputs(layers: Sequence[ExpertParallelMoE]) -> list[torch.Tensor]:
            return [
                layer(*tokens, length=length)
                for layer, tokens, length in zip(layers, routed, lengths, strict=True)
            ]

        live, still, times = self._twins.by_turns(
            step, len(routed[0][1]), lambda: outputs(self._live), lambda: outputs(self._still)
        )
        for live_TH, still_TH in zip(live, still, strict=True):
            self._twins.compare(live_TH, still_TH)
        return times

    def _routed(self, step: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's tokens in one layer: hidden states ``[T, H]``, expert ids and weights ``[T, K]``."""
        shared_rng = np.random.default_rng([self._task.seed, step, layer])
        choices_TK = deal(self._counts_TLE[step, layer], self._top_k, shared_rng)
        ids_TK = own_part(choices_TK, self._rank, self._task.ranks)
        rank_rng = np.random.default_rng([self._task.seed, step, layer, self._rank])
        hidden_TH = rank_rng.standard_normal((ids_TK.shape[0], self._task.hidden), dtype=np.float32)
        weights_TK = rank_rng.random(ids_TK.shape, dtype=np.float32) + 0.1
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        return torch.from_numpy(hidden_TH), torch.from_numpy(ids_TK), torch.from_numpy(weights_TK)


def choices_per_token(counts_TLE: npt.NDArray[np.integer], most: int = 8) -> int:
    """Return the largest top-k with which every step and layer of a trace could have been routed.

    With top-k ``k``, each token chooses ``k`` distinct experts. The number of choices in a step and layer must
    therefore be a multiple of ``k``, and no expert can have more choices than there are tokens. A top-k of 1 fits every
    trace.

    Parameters
    ----------
    counts_TLE
        int ``[T, L, E]``, choices of each expert per step and layer.
    most
        Upper bound on the result.

    Examples
    --------
    Four choices can come from two tokens with two experts each, unless one expert has three of the choices:

    >>> choices_per_token(np.array([[[2, 1, 1]]]))
    2
    >>> choices_per_token(np.array([[[3, 1, 0]]]))
    1
    """
    sums_TL = counts_TLE.sum(axis=2)
    hottest_TL = counts_TLE.max(axis=2)
    for top_k in range(most, 1, -1):
        if (sums_TL % top_k == 0).all() and (hottest_TL * top_k <= sums_TL).all():
            return top_k
    return 1


def deal(counts_E: npt.NDArray[np.integer], top_k: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the choices of random tokens, int64 ``[tokens, top_k]``, that match the given counts.

    Sort the choices by expert and deal them to the tokens in turn, like cards. An expert has at most as many choices as
    there are tokens, so no token receives an expert twice. Then shuffle the tokens.

    Parameters
    ----------
    counts_E
        int ``[E]``, choices of each expert. ``choices_per_token`` gives a ``top_k`` that fits them.
    top_k
        K, the number of experts per token.
    rng
        Generator for the shuffle.

    Examples
    --------
    >>> deal(np.array([2, 1, 1]), top_k=2, rng=np.random.default_rng(0))
    array([[0, 1],
           [0, 2]])
    """
    choices = np.repeat(np.arange(counts_E.shape[0]), counts_E)
    tokens = choices.shape[0] // top_k
    dealt_TK = choices.reshape(top_k, tokens).T
    return np.ascontiguousarray(rng.permutation(dealt_TK))


def own_part(choices_TK: npt.NDArray[np.int64], rank: int, ranks: int) -> npt.NDArray[np.int64]:
    """Return the choices of a rank's source tokens, a contiguous and nearly equal share of all tokens.

    Parameters
    ----------
    choices_TK
        int64 ``[T, K]``, choices of all tokens.
    rank
        Source rank.
    ranks
        R, the number of ranks.
    """
    bounds = np.arange(ranks + 1) * choices_TK.shape[0] // ranks
    return choices_TK[bounds[rank] : bounds[rank + 1]]


if __name__ == "__main__":
    run(_DemoTask, _DemoRank)
