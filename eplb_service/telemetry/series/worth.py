"""Series of what balancing is worth in time, and what moves are priced at."""

from __future__ import annotations

from eplb_service.telemetry.series.registry import SeriesRegistry
from eplb_service.wire.move_price import PricedMoves
from eplb_service.wire.worth import Worth


class WorthSeries:
    """Time won by balancing, and the price of the moves that it takes."""

    def __init__(self, registry: SeriesRegistry) -> None:
        self._registry = registry
        gauge = registry.gauge
        self.experts_seconds = gauge(
            "eplb_experts_seconds",
            "Time of the slowest ranks of all layers in a step: left_alone as met first, serving, best_known.",
            ("deployment", "placement"),
        )
        saved = "Time per step that balancing saves over what the ranks served when they first came together"
        self.gain = gauge("eplb_gain_seconds", f"{saved}, at the price of eplb_time_price_info.")
        self.gain_low = gauge("eplb_gain_low_seconds", f"{saved}: low end of its 95 % interval.")
        self.gain_high = gauge("eplb_gain_high_seconds", f"{saved}: high end of its 95 % interval.")
        self.time_price = gauge(
            "eplb_time_price_info",
            "Constant 1; what tokens cost in time is measured, fitted to step times, stated or assumed.",
            ("deployment", "price"),
        )
        self.step_seconds = gauge(
            "eplb_step_seconds", "Wall time of a step as the ranks' hosts measured it, waits left out."
        )
        self.tokens_won = gauge(
            "eplb_gain_tokens_per_second", "Tokens per second that the time saved amounts to."
        )
        priced = "as the last decision priced its moves"
        self.move_price = gauge(
            "eplb_move_price", f"Part of its ratio that a layer must win to have every slot moved, {priced}."
        )
        self.move_cost = gauge(
            "eplb_move_cost_seconds",
            f"Time that steps lose for each expert that a rank receives, {priced}.",
        )
        self.byte_cost = gauge(
            "eplb_move_cost_seconds_per_byte", "The same for each byte of weights, where their size is known."
        )
        self.switch_cost = gauge(
            "eplb_switch_cost_seconds", f"Time for which the model waits for a layer's switch, {priced}."
        )
        self.move_price_source = gauge(
            "eplb_move_price_info",
            "Constant 1; the price of moves is measured, partly measured, stated or assumed.",
            ("deployment", "price"),
        )

    def report(self, deployment: str, worth: Worth) -> None:
        """What balancing is worth; what is not known any more is removed."""
        for placement, milliseconds in (
            ("left_alone", worth.left_alone_ms),
            ("serving", worth.serving_ms),
            ("best_known", worth.best_ms),
        ):
            self.experts_seconds.labels(deployment, placement).set(milliseconds / 1e3)
        self.gain.labels(deployment).set(worth.gain_ms / 1e3)
        self.gain_low.labels(deployment).set(worth.gain_low_ms / 1e3)
        self.gain_high.labels(deployment).set(worth.gain_high_ms / 1e3)
        self._registry.remove(self.time_price, deployment)
        self.time_price.labels(deployment, worth.price_kind).set(1)
        self._registry.set_or_remove(self.step_seconds, deployment, worth.step_ms, 1e-3)
        self._registry.set_or_remove(self.tokens_won, deployment, worth.tokens_per_second_won)

    def report_price(self, deployment: str, priced: PricedMoves) -> None:
        """What moves were priced at; what is not known any more is removed."""
        self.move_price.labels(deployment).set(priced.price)
        self._registry.remove(self.move_price_source, deployment)
        self.move_price_source.labels(deployment, priced.kind).set(1)
        self._registry.set_or_remove(self.move_cost, deployment, priced.ms_per_move, 1e-3)
        self._registry.set_or_remove(self.byte_cost, deployment, priced.ms_per_megabyte, 1e-9)
        self._registry.set_or_remove(self.switch_cost, deployment, priced.ms_per_switch, 1e-3)

    def forget(self, deployment: str) -> None:
        """Remove all that is reported here of ``deployment``."""
        for metric in (
            self.experts_seconds,
            self.gain,
            self.gain_low,
            self.gain_high,
            self.time_price,
            self.step_seconds,
            self.tokens_won,
            self.move_price,
            self.move_cost,
            self.byte_cost,
            self.switch_cost,
            self.move_price_source,
        ):
            self._registry.remove(metric, deployment)
