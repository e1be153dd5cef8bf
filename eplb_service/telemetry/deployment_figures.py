"""Figures of a deployment as text. ``eplb status``, ``eplb top`` and the web page all show these figures.

Figures that are unknown are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from eplb_core.figures import digits, duration_text, ratio_text, size_text
from eplb_core.wire.generated import operator_pb2

_IDLE_SECONDS = 30.0
"""Age of the newest step, in seconds, above which the age is shown."""


class Figure(NamedTuple):
    """A figure as text.

    Parameters
    ----------
    name
        Name, such as ``hottest rank``.
    value
        Value with its unit.
    note
        Details, which follow the value after a comma.
    tone
        ``good``, ``warn`` or ``bad`` if the figure is a verdict, otherwise empty.
    """

    name: str
    value: str
    note: str
    tone: str = ""


def figures_of(status: operator_pb2.DeploymentStatus) -> dict[str, list[Figure]]:
    """Return the figures of a deployment by group: ``balance``, ``gain`` and ``cost``."""
    return {"balance": [*_balance(status)], "gain": [*_gain(status)], "cost": [*_cost(status)]}


def _balance(status: operator_pb2.DeploymentStatus) -> Iterator[Figure]:
    """Yield the balance over the newest steps, and its forecast."""
    age = status.idle_seconds
    when = "now" if age < _IDLE_SECONDS else f"{duration_text(age)} ago"
    basis = f"measured over the newest {status.par_steps:,} steps" if status.par > 0 else "no measurements"
    yield Figure(f"PAR {when}", ratio_text(status.par), basis)
    if status.HasField("worth"):
        yield Figure("initial layout", ratio_text(status.worth.par_left_alone), "PAR of the same steps")
    if status.HasField("hottest_rank"):
        load = f"{status.hottest_rank_load:.2f} times the mean, over all layers"
        yield Figure("hottest rank", str(status.hottest_rank), load)
    if status.HasField("hottest_layer"):
        par = f"PAR {ratio_text(status.hottest_layer_par)}"
        yield Figure("hottest layer", str(status.hottest_layer), par)
    if status.HasField("forecast"):
        forecast = status.forecast
        interval = f"95 %: {_signed(-forecast.gain_high)} to {_signed(-forecast.gain_low)}"
        yield Figure("forecast", f"PAR {_signed(-forecast.gain)}", f"until the next decision ({interval})")


def _gain(status: operator_pb2.DeploymentStatus) -> Iterator[Figure]:
    """Yield the gain of balancing: in time if that was measured, otherwise in PAR."""
    if not status.HasField("worth"):
        return
    worth = status.worth
    par_change = f"PAR {_signed(-worth.par_gain_percent)} %"
    if worth.HasField("gain_ms"):
        interval = f"99 %: {_signed(worth.gain_low_ms)} to {_signed(worth.gain_high_ms)} ms"
        note = f"{worth.verdict}: {_signed(worth.gain_percent)} % of a step ({interval}), "
        if worth.HasField("tokens_per_second_won"):
            note += f"{_signed(worth.tokens_per_second_won)} tokens/s, "
        note += f"worth {digits(worth.ranks_worth, 2)} of {status.ranks} ranks; {par_change}; {worth.reason}"
        tone = {"helps": "good", "costs": "bad"}.get(worth.verdict, "warn")
        yield Figure("gain", f"{_signed(worth.gain_ms)} ms per step", note, tone)
        return
    note = f"time {worth.verdict}: {worth.reason}"
    if worth.HasField("estimate_low_ms"):
        interval = f"{_signed(worth.estimate_low_ms)} to {_signed(worth.estimate_high_ms)} ms per step"
        note += f"; estimate from the {worth.price_kind} cost of tokens: {interval}"
    yield Figure("gain", par_change, note)


def _cost(status: operator_pb2.DeploymentStatus) -> Iterator[Figure]:
    """Yield the costs of balancing: memory, the price of moves, and totals."""
    slots = f"{status.redundant_slots:,} slots per layer"
    if status.redundant_bytes_per_rank:
        size = size_text(status.redundant_bytes_per_rank)
        yield Figure("redundancy", f"{size} per rank", f"for {slots}")
    else:
        yield Figure("redundancy", slots, "of unknown size")
    if status.HasField("move_price"):
        yield _price(status.move_price)
    moved = f"{status.experts_moved:,} experts, {size_text(status.bytes_moved)}"
    yield Figure("switched", f"{status.layers_switched:,} layers", moved)
    yield Figure("steps received", f"{status.steps_received:,}", f"{status.steps_lost:,} lost")


def _price(price: operator_pb2.MovePrice) -> Figure:
    """Return the price of moves as time if known, otherwise as the PAR reduction that pays for moving all slots."""
    if not price.HasField("ms_per_move"):
        note = f"gain required to move every slot of a layer; {price.kind}"
        return Figure("move price", f"{digits(100 * price.price)} % of PAR", note)
    by_size = f"{digits(price.ms_per_megabyte)} ms per MB, " if price.HasField("ms_per_megabyte") else ""
    note = f"{by_size}{digits(price.ms_per_switch)} ms per switch; {price.kind}"
    return Figure("move price", f"{digits(price.ms_per_move)} ms per expert", note)


def explanations(status: operator_pb2.DeploymentStatus) -> list[str]:
    """Return the reasons behind the times and prices of a deployment, one line each."""
    lines = []
    if status.HasField("worth"):
        worth = status.worth
        lines.append(
            f"gain: over the newest {worth.steps:,} steps, PAR {ratio_text(worth.par)} instead of "
            f"{ratio_text(worth.par_left_alone)} with the initial layout; {worth.reason}"
        )
        if worth.HasField("step_ms"):
            lines.append(f"time of a step: {digits(worth.step_ms)} ms, mean of {worth.timed_steps:,} steps")
        if worth.price:
            lines.append(f"cost of tokens, {worth.price_kind}: {worth.price}")
    if status.HasField("move_price"):
        price = status.move_price
        lines.append(
            f"move price, {price.kind}: moving every slot of a layer must lower its PAR by "
            f"{digits(100 * price.price)} %; {price.reason}"
        )
    return lines


def _signed(value: float) -> str:
    return digits(value, sign="+")
