"""Series of how even the ranks' loads are: ratios served and promised, noise floors, and what was won."""

from __future__ import annotations

from collections.abc import Sequence

from eplb_service.telemetry.series.registry import LAYER, SeriesRegistry


class BalanceSeries:
    """Peak-to-average ratios by layer and by deployment."""

    def __init__(self, registry: SeriesRegistry) -> None:
        self._registry = registry
        gauge = registry.gauge
        self.par_realised = gauge(
            "eplb_par_realised",
            "Peak-to-average ratio of a layer, from loads that the ranks measured.",
            LAYER,
        )
        self.par_planned = gauge(
            "eplb_par_planned",
            "Peak-to-average ratio that the last plan switched in promised for a layer.",
            LAYER,
        )
        self.deployment_par_realised = gauge(
            "eplb_deployment_par_realised", "Mean of eplb_par_realised over layers."
        )
        self.deployment_par_planned = gauge(
            "eplb_deployment_par_planned",
            "Mean over layers that the last decision expects to serve from then on.",
        )
        self.deployment_par_seen = gauge(
            "eplb_deployment_par_seen", "Mean over layers that the last decision found in its window."
        )
        self.noise_floor = gauge(
            "eplb_noise_floor",
            "Ratio that chance alone leaves a balanced layer, as the last decision took it to be.",
            LAYER,
        )
        self.deployment_noise_floor = gauge(
            "eplb_deployment_noise_floor", "Mean of eplb_noise_floor over layers."
        )
        self.rank_load = gauge(
            "eplb_rank_load",
            "Tokens of a rank over the mean rank, mean over layers, in the newest steps.",
            ("deployment", "rank"),
        )
        won = "Peak-to-average ratio won over what the ranks served when they first came together, in the last window"
        self.gain = gauge("eplb_deployment_gain", f"{won}.")
        self.gain_low = gauge("eplb_deployment_gain_low", f"{won}: low end of its 95 % interval.")
        self.gain_high = gauge("eplb_deployment_gain_high", f"{won}: high end of its 95 % interval.")

    def won(self, deployment: str, mean: float, low: float, high: float) -> None:
        """What balancing has won, and the interval that it lies in."""
        self.gain.labels(deployment).set(mean)
        self.gain_low.labels(deployment).set(low)
        self.gain_high.labels(deployment).set(high)

    def layer_pars(self, deployment: str, realised: Sequence[float], planned: dict[int, float]) -> None:
        """Ratios ``realised`` by layer, zeros of which were not measured and are left out, and ``planned`` ones."""
        for layer, value in enumerate(realised):
            if value > 0:
                self.par_realised.labels(deployment, str(layer)).set(value)
        for layer, value in planned.items():
            self.par_planned.labels(deployment, str(layer)).set(value)

    def forget_layers(self, deployment: str) -> None:
        """Remove what was reported of a deployment's layers and ranks."""
        for metric in (self.par_realised, self.par_planned, self.noise_floor, self.rank_load):
            self._registry.remove(metric, deployment)
