"""What the ranks of a made-up deployment count, drawn once and sent again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Placement
from eplb_service.wire.heat import HeatReport, StepPhase

_VARIANTS = 4
_TOKENS, _TOP_K = 64, 8
_SLOTS_OVER_EXPERTS = 1.125


@dataclass(frozen=True)
class Scale:
    """A deployment's size.

    Parameters
    ----------
    ranks, layers, experts
        R, L and E.
    """

    ranks: int
    layers: int
    experts: int

    @property
    def slots(self) -> int:
        """S: an eighth more slots than experts, in whole slots per rank."""
        return -(-int(_SLOTS_OVER_EXPERTS * self.experts) // self.ranks)

    def placement(self) -> Placement:
        """What it starts with."""
        return Placement.linear(self.layers, self.experts, self.ranks, self.slots)


def drawn_reports(scale: Scale, rank: int, steps: int, *, sums: bool) -> list[HeatReport]:
    """A few reports of ``steps`` steps of a rank that decodes 64 sequences with 8 choices each; epoch 0, from step 0.

    Own tokens are counted step by step, or with ``sums`` once over all of a report's steps. Popularity is skewed, in
    each layer for other experts, and the same for all ranks.
    """
    popularity_LE = _popularity(scale)
    rng = np.random.default_rng(rank)
    return [_drawn(scale, rank, steps, popularity_LE, rng, sums=sums) for _ in range(_VARIANTS)]


def _popularity(scale: Scale) -> npt.NDArray[np.float64]:
    rng = np.random.default_rng(7)
    weights_LE = np.exp(0.9 * rng.standard_normal((scale.layers, scale.experts)))
    popularity_LE: npt.NDArray[np.float64] = weights_LE / weights_LE.sum(axis=1, keepdims=True)
    return popularity_LE


def _drawn(
    scale: Scale,
    rank: int,
    steps: int,
    popularity_LE: npt.NDArray[np.float64],
    rng: np.random.Generator,
    *,
    sums: bool,
) -> HeatReport:
    choices = _TOKENS * _TOP_K
    experts_S = np.arange(rank * scale.slots, (rank + 1) * scale.slots) % scale.experts
    replicas = scale.ranks * scale.slots / scale.experts
    expected_LS = choices * scale.ranks * popularity_LE[:, experts_S] / replicas
    counts: dict[str, Any] = {}
    if sums:
        counts["source_sums_LE"] = rng.poisson(steps * choices * popularity_LE)
    else:
        counts["source_counts_TLE"] = rng.poisson(choices * popularity_LE, (steps, *popularity_LE.shape))
    return HeatReport(
        first_step=0,
        layer_epochs=(0,) * scale.layers,
        slot_counts_TLS=rng.poisson(expected_LS, (steps, *expected_LS.shape)),
        phase_T=np.full(steps, StepPhase.DECODE, dtype=np.uint8),
        tokens_T=np.full(steps, _TOKENS),
        **counts,
    )
