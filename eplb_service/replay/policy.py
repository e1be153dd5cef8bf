"""Policies by name: the planner's own, flashlb with one idea switched off, and any function of yours."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eplb_service.planner.settings import POLICIES, PlannerSettings
from eplb_service.replay.schedule import ReplayError

External = Callable[..., Any]
"""``function(heat_TLE, phy2log_LRS)`` returns ``phy2log_LRS``, or that and ``log2phy_RLE``."""

ABLATIONS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "flashlb-no-tree": ({"tree_search": False}, "greedy replica counts"),
    "flashlb-no-annealing": ({"annealing": False}, "no annealing where ranks have few slots"),
    "flashlb-no-local": (
        {"local_search": False},
        "no swaps, exchanges or annealing after the placement is built",
    ),
    "flashlb-no-swaps": ({"swaps": False}, "the local search exchanges replicas only"),
    "flashlb-no-exchanges": ({"exchanges": False}, "the local search swaps experts only"),
    "flashlb-no-table-swaps": ({"table_swaps": False}, "no swaps once the tables are solved"),
    "flashlb-no-table-kicks": ({"table_kicks": False}, "no random exchanges where tables are coarse"),
    "flashlb-no-holdout": ({"holdout": False}, "changes need not pay on the newer half of the window"),
    "flashlb-no-price-ladder": ({"price_ladder": False}, "only the true price of a move is tried"),
    "flashlb-no-sureness": ({"sureness": 0.0}, "what a change won is taken as it is, whatever its error"),
    "flashlb-no-volatility": (
        {"volatility": False},
        "layers are searched whatever their experts' jumps explain",
    ),
    "flashlb-no-tables": ({"solve_tables": False}, "the engines' fixed log2phy"),
    "flashlb-one-episode": ({"episodes": 1}, "plans on the plain sum of the window"),
    "flashlb-no-fading": ({"half_lives": (math.inf,)}, "old steps count as much as new ones"),
    "flashlb-no-trimmed-mean": ({"trimmed_mean": False}, "bursts in the window count as lasting heat"),
    "flashlb-cold": ({"warm": False}, "every picked layer is placed from scratch"),
    "flashlb-all-layers": ({"par_threshold": 1.0, "min_gain": 0.0, "max_layers": None}, "no cherry-picking"),
    "flashlb-free-moves": ({"move_price": 0.0}, "moves cost nothing"),
}
"""flashlb with one idea switched off: the settings that do it, and what that means."""

ON_CHANGE = "flashlb-on-change"
"""flashlb, deciding when ``planner.pace`` says and not every interval: the service with ``decide_on: change``."""

NAMES = (*POLICIES, ON_CHANGE, *ABLATIONS)
"""All policies that have a name; any other is ``module:function``."""


@dataclass(frozen=True)
class Policy:
    """One policy.

    Parameters
    ----------
    name
        As the user gave it.
    settings
        The planner's, switched as the name says.
    target
        ``module:function`` of an external policy; empty for the planner's own.
    on_change
        Whether it decides when what is realised departs from what was promised, and not every interval.
    """

    name: str
    settings: PlannerSettings
    target: str = ""
    on_change: bool = False

    @classmethod
    def of(cls, name: str, settings: PlannerSettings) -> Policy:
        """The policy called ``name``, otherwise as ``settings`` say; raises ``ReplayError`` where there is none."""
        if name in POLICIES:
            return cls(name, replace(settings, policy=name))
        if name == ON_CHANGE:
            return cls(name, replace(settings, policy="flashlb"), on_change=True)
        if name in ABLATIONS:
            return cls(name, replace(settings, policy="flashlb", **ABLATIONS[name][0]))
        if ":" in name:
            return cls(name, settings, target=name)
        raise ReplayError(
            f"unknown policy {name!r}; choose among {', '.join(NAMES)}, or give module:function"
        )

    def external(self) -> External:
        """The function of an external policy; raises ``ReplayError`` where it cannot be imported."""
        module_name, _, attribute = self.target.partition(":")
        # An installed command does not look for modules where it is called, as python -m does.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ReplayError(
                f"policy {self.name}: cannot import {module_name!r} ({_message(error)})"
            ) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise ReplayError(f"policy {self.name}: {module_name} has no function {attribute!r}")
        return function  # type: ignore[no-any-return]


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
