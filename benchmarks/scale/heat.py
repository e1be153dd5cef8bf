"""A deployment's synthetic heat, as reports from its ranks."""

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
_TOKENS = 64
_TOP_K = 8
_SLOTS_OVER_EXPERTS = 1.125


@dataclass(frozen=True)
class Scale:
    """Size of a deployment.

    Parameters
    ----------
    ranks
        Number of ranks, R.
    layers
        Number of layers, L.
    experts
        Experts per layer, E.
    slots
        Slots per rank, S. By default, there are one eighth more slots than experts, rounded up to whole slots per rank.

    Examples
    --------
    288 slots are an eighth more than 256 experts, so each of 32 ranks has 9:

    >>> Scale(ranks=32, layers=58, experts=256).shape.slots
    9
    """

    ranks: int
    layers: int
    experts: int
    slots: int | None = None

    @property
    def shape(self) -> Shape:
        """The deployment's shape as agents report it."""
        slots = self.slots or -(-int(_SLOTS_OVER_EXPERTS * self.experts) // self.ranks)
        return Shape(self.ranks, self.layers, self.experts, slots, bytes_per_expert=1 << 20)

    def placement(self) -> Placement:
        """Return the initial placement."""
        return Placement.linear(self.layers, self.experts, self.ranks, self.shape.slots)


@cache
def _popularity(scale: Scale) -> Float64:
    """Return each expert's share of its layer's tokens, float64 ``[L, E]``. Every layer has different hot experts."""
    weights_LE = np.exp(0.9 * np.random.default_rng(7).standard_normal((scale.layers, scale.experts)))
    popularity_LE: Float64 = weights_LE / weights_LE.sum(axis=1, keepdims=True)
    return popularity_LE


def _expected(scale: Scale, layer: int, phy2log_RS: Int32, rank: int) -> Float64:
    """Return the expected tokens per step in a rank's slots in one layer, float64 ``[S]``, with an even split."""
    replicas_E = np.bincount(phy2log_RS.ravel(), minlength=scale.experts)
    expert_S = phy2log_RS[rank]
    tokens_S: Float64 = _popularity(scale)[layer, expert_S] / replicas_E[expert_S]
    return _TOKENS * _TOP_K * scale.ranks * tokens_S


def drawn_report(scale: Scale, rank: int, steps: int, expected_LS: Float64, variant: int = 0) -> HeatReport:
    """Draw a report from a rank that decodes 64 sequences with 8 choices each. It starts at step 0, in epoch 0.

    The source heat is summed over the steps.

    Parameters
    ----------
    scale
        Size of the deployment.
    rank
        Rank that sends the report.
    steps
        Number of steps in the report.
    expected_LS
        Expected tokens per step and slot, float64 ``[L, S]``.
    variant
        Seed that distinguishes several reports from the same rank.
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
    """Return the expected tokens per step in a rank's slots under a placement, float64 ``[L, S]``."""
    rows = enumerate(placement.phy2log_LRS)
    return np.stack([_expected(scale, layer, phy2log_RS, rank) for layer, phy2log_RS in rows])


@dataclass
class _Drawn:
    """An encoded report.

    Parameters
    ----------
    message
        The encoded report.
    counts_TLS
        int32 ``[T, L, S]``, tokens per step and slot.
    counted
        Number of layer switches that ``counts_TLS`` reflects.
    """

    message: agent_pb2.ConnectRequest
    counts_TLS: Int32
    counted: int = 0


class Reports:
    """Reports from one rank. Each is drawn once and sent repeatedly; after a switch, the layer's tokens are redrawn.

    Parameters
    ----------
    scale
        Size of the deployment.
    rank
        Rank that sends the reports.
    expected_LS
        Expected tokens per step and slot before any switch, float64 ``[L, S]``.
    """

    def __init__(self, scale: Scale, rank: int, expected_LS: Float64) -> None:
        self.switched: list[RankLayer] = []
        self._scale = scale
        self._rank = rank
        self._expected_LS = expected_LS
        self._epochs = [0] * scale.layers
        self._drawn: dict[tuple[int, int], _Drawn] = {}

    def switch(self, update: RankLayer, epoch: int) -> None:
        """Change the placement of a layer."""
        self._expected_LS[update.layer] = _expected(self._scale, update.layer, update.phy2log_RS, self._rank)
        self._epochs[update.layer] = epoch
        self.switched.append(update)

    def message(self, step: int, steps: int, dropped_steps: int, switching: bool) -> agent_pb2.ConnectRequest:
        """Return a report of ``steps`` steps starting at ``step``. Only one variant is updated while layers switch."""
        # Draw all variants in advance. A rank that had to draw one at the end of an interval would report it late.
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
