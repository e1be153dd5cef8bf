"""Made-up heat of a deployment, as its ranks report it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from eplb_core.heat.phase import StepPhase
from eplb_core.placement import Float64, Int32, Placement
from eplb_core.wire.agent import Shape
from eplb_core.wire.codec import encode, pack
from eplb_core.wire.generated import agent_pb2
from eplb_core.wire.heat import HeatReport
from eplb_core.wire.plan import RankLayer

_VARIANTS = 4
_TOKENS, _TOP_K = 64, 8
_SLOTS_OVER_EXPERTS = 1.125


@dataclass(frozen=True)
class Scale:
    """A deployment's size: R, L, E and S; by default an eighth more slots than experts, in whole slots per rank."""

    ranks: int
    layers: int
    experts: int
    slots: int | None = None

    @property
    def shape(self) -> Shape:
        """As an agent reports it."""
        slots = self.slots or -(-int(_SLOTS_OVER_EXPERTS * self.experts) // self.ranks)
        return Shape(self.ranks, self.layers, self.experts, slots, bytes_per_expert=1 << 20)

    def placement(self) -> Placement:
        """The placement that it starts with."""
        return Placement.linear(self.layers, self.experts, self.ranks, self.shape.slots)


@cache
def _popularity(scale: Scale) -> Float64:
    """Part of a layer's tokens that each expert gets, float64 ``[L, E]``: skewed, in each layer for other experts."""
    weights_LE = np.exp(0.9 * np.random.default_rng(7).standard_normal((scale.layers, scale.experts)))
    popularity_LE: Float64 = weights_LE / weights_LE.sum(axis=1, keepdims=True)
    return popularity_LE


def _expected(scale: Scale, layer: int, phy2log_RS: Int32, rank: int) -> Float64:
    """Tokens of a step that a rank's slots of one layer expect, float64 ``[S]``; replicas share evenly."""
    replicas_E = np.bincount(phy2log_RS.ravel(), minlength=scale.experts)
    expert_S = phy2log_RS[rank]
    tokens_S: Float64 = _popularity(scale)[layer, expert_S] / replicas_E[expert_S]
    return _TOKENS * _TOP_K * scale.ranks * tokens_S


def drawn_report(scale: Scale, rank: int, steps: int, expected_LS: Float64, variant: int = 0) -> HeatReport:
    """A report of ``steps`` steps of a rank that decodes 64 sequences with 8 choices each; epoch 0, from step 0.

    Its slots expect ``expected_LS`` tokens in a step. Own tokens are summed over the steps.
    """
    rng = np.random.default_rng((rank, variant))
    return HeatReport(
        first_step=0,
        layer_epochs=(0,) * scale.layers,
        slot_counts_TLS=rng.poisson(expected_LS, (steps, *expected_LS.shape)),
        phase_T=np.full(steps, StepPhase.DECODE, dtype=np.uint8),
        tokens_T=np.full(steps, _TOKENS),
        source_sums_LE=rng.poisson(steps * _TOKENS * _TOP_K * _popularity(scale)),
    )


def expected_tokens(scale: Scale, placement: Placement, rank: int) -> Float64:
    """Tokens that a rank's slots expect in a step under a placement, float64 ``[L, S]``."""
    rows = enumerate(placement.phy2log_LRS)
    return np.stack([_expected(scale, layer, phy2log_RS, rank) for layer, phy2log_RS in rows])


@dataclass
class _Drawn:
    """A report that is drawn and encoded, and what slots receive in it once the first ``counted`` layers switched."""

    message: agent_pb2.ConnectRequest
    counts_TLS: Int32
    counted: int = 0


class Reports:
    """One rank's reports, drawn once and sent again and again; for layers that switched tokens are drawn again.

    Its slots expect ``expected_LS`` tokens in a step until then, float64 ``[L, S]``.
    """

    def __init__(self, scale: Scale, rank: int, expected_LS: Float64) -> None:
        self.switched: list[RankLayer] = []
        self._scale = scale
        self._rank = rank
        self._expected_LS = expected_LS
        self._epochs = [0] * scale.layers
        self._drawn: dict[tuple[int, int], _Drawn] = {}

    def switch(self, update: RankLayer, epoch: int) -> None:
        """Let a layer serve another placement."""
        self._expected_LS[update.layer] = _expected(self._scale, update.layer, update.phy2log_RS, self._rank)
        self._epochs[update.layer] = epoch
        self.switched.append(update)

    def message(self, step: int, steps: int, dropped_steps: int, switching: bool) -> agent_pb2.ConnectRequest:
        """Return the report of these steps; only one is kept up to date while layers are ``switching``."""
        # All at once: ranks that draw some when an interval ends report it late.
        variants = 1 if switching else _VARIANTS
        for key in ((steps, variant) for variant in range(variants)):
            if key not in self._drawn:
                report = drawn_report(self._scale, self._rank, steps, self._expected_LS, key[1])
                message = agent_pb2.ConnectRequest(heat_report=encode(report))
                self._drawn[key] = _Drawn(message, report.slot_counts_TLS.astype(np.int32))
        drawn = self._drawn[steps, (step // steps + self._rank) % variants]
        stale: Sequence[RankLayer] = self.switched[drawn.counted :]
        if stale:
            rng = np.random.default_rng((self._rank, step))
            for update in stale:
                expected_S = self._expected_LS[update.layer]
                drawn.counts_TLS[:, update.layer] = rng.poisson(expected_S, (steps, expected_S.size))
            drawn.message.heat_report.slot_counts.CopyFrom(pack(drawn.counts_TLS))
            drawn.message.heat_report.layer_epochs[:] = self._epochs
            drawn.counted = len(self.switched)
        drawn.message.heat_report.first_step = step
        drawn.message.heat_report.dropped_steps = dropped_steps
        return drawn.message
