"""What a replay's milliseconds rest on: each number with where it comes from, so that none enters unseen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from eplb_service.replay.costs import Costs

GIVEN, ASSUMED = "given", "assumed"


@dataclass(frozen=True)
class Assumption:
    """One number that results rest on.

    Parameters
    ----------
    name
        Of the option.
    value
        With its unit, for people.
    source
        ``given``, ``assumed``, or where it was measured.
    """

    name: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.value} ({self.source})"


def assumptions(costs: Costs, given: Collection[str]) -> tuple[Assumption, ...]:
    """The numbers that results with these costs rest on; ``given`` names the fields that a user stated.

    Those that enter nowhere are left out: without the time of a step nothing is late and nothing waits.
    """
    found = [_curve(costs)]

    def add(name: str, value: str) -> None:
        found.append(Assumption(name, value, GIVEN if name in given else ASSUMED))

    if costs.step_ms:
        add("step_ms", f"{costs.step_ms:g} ms")
        if costs.curve is None:
            add("moe_share", f"{costs.moe_share:g} of a step")
        add("solve_ms", f"{costs.solve_ms:g} ms")
        add("bandwidth", f"{costs.bandwidth / 1e9:g} GB/s")
    if costs.step_ms or costs.curve is not None:
        add("commit_ms", f"{costs.commit_ms:g} ms")
    if costs.split is not None and costs.curve is not None:
        source = GIVEN if costs.split.stated else ASSUMED
        found.append(Assumption("split_overhead_us", str(costs.split), source))
    if costs.step_ms or costs.bytes_per_expert:
        add("bytes_per_expert", f"{costs.bytes_per_expert}")
    return tuple(found)


def _curve(costs: Costs) -> Assumption:
    curve = costs.curve
    if curve is None:
        return Assumption("cost_curve", "linear: time follows the tokens of the hottest rank", ASSUMED)
    fit = "no fit is known" if curve.fit is None else str(curve.fit)
    return Assumption("cost_curve", str(curve), f"{curve.source}; {fit}")
