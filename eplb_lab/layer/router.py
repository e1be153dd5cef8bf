"""Routers, which choose the experts of each token from its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

RoutingFunction = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Function of logits ``[T, E]`` and K that returns weights and ids, both ``[T, K]``."""


class Scoring(str, Enum):
    """Function that turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Router:
    """Top-k routing with the variants that models use.

    Raises ``ValueError`` if the settings are inconsistent.

    Parameters
    ----------
    experts
        E, the number of experts, including zero and identity experts.
    top_k
        K, the number of choices per token.
    scoring
        Function that turns logits into scores.
    renormalise
        True to scale each token's weights so that they sum to one.
    groups
        Number of groups of consecutive experts.
    top_groups
        Number of groups that a token can choose from. Groups are ranked by their highest score or, if there is a
        correction bias, by the sum of their two highest scores.
    correction_bias_E
        Bias that is added to the scores when experts are chosen, but not when weights are computed.
    scaling_factor
        Factor applied to all weights at the end.
    custom
        Model-specific routing function. It replaces everything except ``scaling_factor``.

    Examples
    --------
    >>> weights, ids = Router(experts=4, top_k=2)(torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
    >>> ids, weights
    (tensor([[1, 2]], dtype=torch.int32), tensor([[0.7311, 0.2689]]))

    If one of two groups is chosen, both experts belong to the same group:

    >>> weights, ids = Router(experts=4, top_k=2, groups=2, top_groups=1)(torch.tensor([[0.0, 2.0, 1.0, -1.0]]))
    >>> ids
    tensor([[1, 0]], dtype=torch.int32)
    """

    experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    correction_bias_E: torch.Tensor | None = None
    scaling_factor: float = 1.0
    custom: RoutingFunction | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be 1..{self.experts}, the number of experts, got {self.top_k}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"{self.experts} experts cannot be split evenly into {self.groups} groups")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"top_groups must be 1..{self.groups}, the number of groups, got {self.top_groups}"
            )
        eligible = self.experts // self.groups * self.top_groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k must be 1..{eligible}, the number of experts in {self.top_groups} groups, got {self.top_k}"
            )
        bias = self.correction_bias_E
        if bias is not None and bias.shape != (self.experts,):
            raise ValueError(f"the correction bias must have shape [{self.experts}], got {list(bias.shape)}")

    def __call__(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 weights and int32 ids, both ``[T, K]``, best choice first.

        Raises ``ValueError`` if the shape of the logits is not ``[T, E]``.
        """
        if logits_TE.ndim != 2 or logits_TE.shape[1] != self.experts:
            raise ValueError(
                f"router logits must have shape [T, {self.experts}], got {list(logits_TE.shape)}"
            )
        if self.custom is not None:
            weights_TK, ids_TK = self.custom(logits_TE, self.top_k)
        else:
            weights_TK, ids_TK = self._choose(logits_TE.float())
        return weights_TK.float() * self.scaling_factor, ids_TK.to(torch.int32)

    def _choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        softmax = self.scoring is Scoring.SOFTMAX
        scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
        biased_TE = scores_TE if self.correction_bias_E is None else scores_TE + self.correction_bias_E
        if self.top_groups < self.groups:
            biased_TE = biased_TE.masked_fill(~self._eligible(biased_TE), float("-inf"))
        elif softmax and self.correction_bias_E is None:
            # Use the logits, which have the same order as the scores. Small probabilities might be rounded to ties.
            biased_TE = logits_TE
        ids_TK = biased_TE.topk(self.top_k, dim=-1).indices
        if softmax and self.renormalise:
            # The softmax over the chosen logits equals the renormalised softmax over all logits.
            return logits_TE.gather(1, ids_TK).softmax(dim=-1), ids_TK
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return weights_TK, ids_TK

    def _eligible(self, biased_TE: torch.Tensor) -> torch.Tensor:
        """Return a mask of the experts in each token's best groups, bool ``[T, E]``."""
        grouped_TGS = biased_TE.unflatten(1, (self.groups, -1))
        best_scores = 1 if self.correction_bias_E is None else min(2, grouped_TGS.shape[2])
        merit_TG = grouped_TGS.topk(best_scores, dim=2).values.sum(dim=2)
        best_TG = merit_TG.topk(self.top_groups, dim=1).indices
        eligible_TG = torch.zeros_like(merit_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        return eligible_TG.repeat_interleave(grouped_TGS.shape[2], dim=1)


def grouped_routing(groups: int) -> RoutingFunction:
    """Return a routing function that chooses K/G experts from each of G groups of consecutive experts.

    This is the routing of Pangu's mixture of grouped experts (MoGE). The weights are the softmax over a token's
    choices, which are sorted by logit. The function raises ``ValueError`` if the experts or the choices do not divide
    into ``groups``.

    Examples
    --------
    >>> weights, ids = grouped_routing(2)(torch.tensor([[0.0, 2.0, 1.0, -1.0]]), 2)
    >>> ids
    tensor([[1, 2]])
    """

    def choose(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        experts = logits_TE.shape[1]
        _check_groups(experts, top_k, groups)
        chosen_TGC, index_TGC = logits_TE.unflatten(1, (groups, -1)).topk(top_k // groups, dim=2)
        first_G1 = torch.arange(0, experts, experts // groups, device=logits_TE.device).unsqueeze(1)
        chosen_TK, order_TK = chosen_TGC.flatten(1).sort(dim=1, descending=True)
        return chosen_TK.softmax(dim=-1), (index_TGC + first_G1).flatten(1).gather(1, order_TK)

    return choose


def _check_groups(experts: int, top_k: int, groups: int) -> None:
    if experts % groups or top_k % groups:
        raise ValueError(f"{experts} experts and {top_k} choices cannot be split evenly into {groups} groups")


def balanced_choices(
    tokens: int,
    experts: int,
    top_k: int,
    device: torch.device,
    *,
    rank: int = 0,
    groups: int = 1,
) -> torch.Tensor:
    """Return choices that load the experts as evenly as possible, for runs that measure memory use.

    No token chooses an expert twice. On each rank, the choice counts of any two experts differ by at most one. The
    same is true of the sums over ranks with equal token counts, because each rank continues the sequence of the
    previous rank.

    Parameters
    ----------
    tokens
        T, the number of tokens of this rank.
    experts
        E, the number of experts.
    top_k
        K, the number of choices per token.
    device
        Device of the result.
    rank
        Index of this rank.
    groups
        Number of groups of consecutive experts. Each token chooses K / ``groups`` experts of every group, as MoGE
        requires.

    Returns
    -------
    torch.Tensor
        Chosen experts, int32 ``[T, K]``.

    Raises
    ------
    ValueError
        If K is not within 1..E, or if E or K cannot be split evenly into the groups.

    Examples
    --------
    >>> choices = balanced_choices(tokens=3, experts=4, top_k=2, device=torch.device("cpu"))
    >>> sorted(choices.flatten().bincount().tolist())
    [1, 1, 2, 2]
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1..{experts}, the number of experts, got {top_k}")
    _check_groups(experts, top_k, groups)
    size = experts // groups
    share = top_k // groups
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(size, generator=generator, dtype=torch.int32) for _ in range(groups)]
    order_GS = torch.stack(orders).to(device)
    order_GS += torch.arange(0, experts, size, dtype=torch.int32, device=device).unsqueeze(1)
    first = rank * tokens * share
    index_TC = torch.arange(first, first + tokens * share, device=device).view(tokens, share) % size
    return order_GS[:, index_TC].transpose(0, 1).flatten(1)
