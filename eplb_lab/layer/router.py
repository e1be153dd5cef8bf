"""Routers: the choice of each token's experts from its logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

RoutingFunction = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Logits ``[T, E]`` and K -> weights and ids, both ``[T, K]``."""


class Scoring(str, Enum):
    """The function from logits to scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Router:
    """Top-k routing as models define it; ``ValueError`` where the settings do not fit together.

    ``experts`` are E, zero and identity experts among them. Only experts of each token's ``top_groups`` best groups of
    consecutive ones can be chosen; a group is as good as its best expert, or with a correction bias, which is added to
    the scores for the choice alone, as its two best together. The chosen weights are scaled to sum to one where
    ``renormalise`` says so, and multiplied by ``scaling_factor`` in the end. A ``custom`` function of a model replaces
    all but that.
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
            raise ValueError(f"{self.experts} experts do not divide into {self.groups} groups")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"top_groups must be 1..{self.groups}, the number of groups, got {self.top_groups}"
            )
        eligible = self.experts // self.groups * self.top_groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k must be 1..{eligible}, the experts of {self.top_groups} groups, got {self.top_k}"
            )
        bias = self.correction_bias_E
        if bias is not None and bias.shape != (self.experts,):
            raise ValueError(
                f"the correction bias must have the shape [{self.experts}], got {list(bias.shape)}"
            )

    def __call__(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights and int32 ids, both ``[T, K]``, best first; ``ValueError`` where the logits do not fit."""
        if logits_TE.ndim != 2 or logits_TE.shape[1] != self.experts:
            raise ValueError(
                f"router logits must have the shape [T, {self.experts}], got {list(logits_TE.shape)}"
            )
        if self.custom is not None:
            weights_TK, ids_TK = self.custom(logits_TE, self.top_k)
        else:
            weights_TK, ids_TK = self._choose(logits_TE.float())
        return weights_TK.float() * self.scaling_factor, ids_TK.to(torch.int32)

    def _choose(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        softmax = self.scoring is Scoring.SOFTMAX
        scores_TE = logits_TE.softmax(-1) if softmax else logits_TE.sigmoid()
        wanted_TE = scores_TE if self.correction_bias_E is None else scores_TE + self.correction_bias_E
        if self.top_groups < self.groups:
            wanted_TE = wanted_TE.masked_fill(~self._eligible(wanted_TE), float("-inf"))
        elif softmax and self.correction_bias_E is None:
            # The same order, without the ties that small probabilities round to.
            wanted_TE = logits_TE
        ids_TK = wanted_TE.topk(self.top_k, dim=-1).indices
        if softmax and self.renormalise:
            # Softmax over the chosen logits alone is softmax over all of them, renormalised.
            return logits_TE.gather(1, ids_TK).softmax(dim=-1), ids_TK
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return weights_TK, ids_TK

    def _eligible(self, wanted_TE: torch.Tensor) -> torch.Tensor:
        """bool ``[T, E]``: the experts of each token's best groups."""
        in_groups_TGS = wanted_TE.unflatten(1, (self.groups, -1))
        judged = 1 if self.correction_bias_E is None else min(2, in_groups_TGS.shape[2])
        merit_TG = in_groups_TGS.topk(judged, dim=2).values.sum(dim=2)
        best_TG = merit_TG.topk(self.top_groups, dim=1).indices
        eligible_TG = torch.zeros_like(merit_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        return eligible_TG.repeat_interleave(in_groups_TGS.shape[2], dim=1)


def grouped_routing(groups: int) -> RoutingFunction:
    """Make a routing to equally many experts of each of so many groups of consecutive ones (Pangu's MoGE).

    Weights are the softmax over a token's choices, which are sorted by logit. Raises ``ValueError`` where experts or
    choices do not divide into groups.
    """

    def choose(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        experts = logits_TE.shape[1]
        _check_groups(experts, top_k, groups)
        chosen_TGC, place_TGC = logits_TE.unflatten(1, (groups, -1)).topk(top_k // groups, dim=2)
        first_G1 = torch.arange(0, experts, experts // groups, device=logits_TE.device).unsqueeze(1)
        chosen_TK, order_TK = chosen_TGC.flatten(1).sort(dim=1, descending=True)
        return chosen_TK.softmax(dim=-1), (place_TGC + first_G1).flatten(1).gather(1, order_TK)

    return choose


def _check_groups(experts: int, top_k: int, groups: int) -> None:
    if experts % groups or top_k % groups:
        raise ValueError(f"{experts} experts and {top_k} choices do not divide into {groups} groups")


def balanced_choices(
    tokens: int,
    experts: int,
    top_k: int,
    device: torch.device,
    *,
    rank: int = 0,
    groups: int = 1,
) -> torch.Tensor:
    """Draw choices as even as can be, int32 ``[T, K]``, for runs that measure memory and not a model.

    No token chooses an expert twice, and any two experts are chosen equally often, give or take one: on each rank, and
    over ranks with equally many tokens, each ``rank`` of which begins where the one before it ends. ``tokens``,
    ``experts`` and ``top_k`` are T, E and K; ``device`` gets the choices. Of several ``groups`` of consecutive experts
    each token chooses equally many of every one, as MoGE wants of the ranks' groups; ``ValueError`` where they do not
    divide into so many.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1..{experts}, the number of experts, got {top_k}")
    _check_groups(experts, top_k, groups)
    size, share = experts // groups, top_k // groups
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(size, generator=generator, dtype=torch.int32) for _ in range(groups)]
    order_GS = torch.stack(orders).to(device)
    order_GS += torch.arange(0, experts, size, dtype=torch.int32, device=device).unsqueeze(1)
    first = rank * tokens * share
    place_TC = torch.arange(first, first + tokens * share, device=device).view(tokens, share) % size
    return order_GS[:, place_TC].transpose(0, 1).flatten(1)
