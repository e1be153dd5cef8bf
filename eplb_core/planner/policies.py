"""Policies by name: built-in ones, ``module:function``, entry points, and functions.

A policy of your own is a function ``policy(heat_TLE, phy2log_LRS)``: tokens ``[T, L, E]`` of the window and int32
``[L, R, S]`` what is deployed. It returns ``phy2log_LRS``, or that and ``log2phy_RLE``. A package registers one as an
entry point of the group ``eplb.policies``. All commands and ``solve`` read a name in the same way.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core.heat.window import Window, widened
from eplb_core.placement import Int32, Placement, checked_foreign, repaired
from eplb_core.planner.settings import POLICIES

GROUP = "eplb.policies"
"""Group of the entry points that name policies."""

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "flashlb-no-tree": {"tree_search": False},
    "flashlb-no-annealing": {"annealing": False},
    "flashlb-no-local": {"local_search": False},
    "flashlb-no-table-swaps": {"table_swaps": False},
    "flashlb-no-holdout": {"holdout": False},
    "flashlb-no-price-ladder": {"price_ladder": False},
    "flashlb-no-sureness": {"sureness": 0.0},
    "flashlb-no-volatility": {"volatility": False},
    "flashlb-no-tables": {"solve_tables": False},
    "flashlb-one-episode": {"episodes": 1},
    "flashlb-no-fading": {"half_lives": (math.inf,)},
    "flashlb-no-trimmed-mean": {"trimmed_mean": False},
    "flashlb-cold": {"warm": False},
    "flashlb-all-layers": {"par_threshold": 1.0, "min_gain": 0.0, "max_layers": None},
    "flashlb-free-moves": {"move_price": 0.0},
}
"""flashlb with one idea switched off: the ``SearchOptions`` or ``PlannerSettings`` that do it."""

NAMES = (*POLICIES, *ABLATIONS)
"""The built-in policies."""

PolicyFunction = Callable[..., Any]


class PolicyError(ValueError):
    """A policy that does not exist, fails, or answers no placement; the message says which and why."""


def options_of(policy: str) -> dict[str, Any]:
    """Return the options of a built-in policy, as ``request.with_options`` takes them."""
    return {"policy": "flashlb", **ABLATIONS[policy]} if policy in ABLATIONS else {"policy": policy}


def registered() -> tuple[str, ...]:
    """Return the names of the installed entry points, in order."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def external_policy(policy: str | PolicyFunction) -> PolicyFunction | None:
    """Find the function of a policy.

    Parameters
    ----------
    policy
        A function, or a name: built-in, of an entry point, or ``module:function``.

    Returns
    -------
    PolicyFunction or None
        ``None`` for a built-in policy.

    Raises
    ------
    PolicyError
        If there is no such policy, or it cannot be imported.
    """
    if callable(policy):
        return policy
    if policy in NAMES:
        return None
    if not isinstance(policy, str):
        raise PolicyError(f"policy is {policy!r}; give a name or a function")
    module_name, colon, attribute = policy.partition(":")
    if not colon:
        return _registered_function(policy)
    # An installed command does not look for modules where it is called, as python -m does.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PolicyError(f"policy {policy}: cannot import {module_name!r} ({_in_a_line(error)})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PolicyError(f"policy {policy}: {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _registered_function(policy: str) -> PolicyFunction:
    for entry in entry_points(group=GROUP, name=policy):
        try:
            function = entry.load()
        except Exception as error:
            raise PolicyError(
                f"policy {policy}: cannot import {entry.value!r} ({_in_a_line(error)})"
            ) from error
        if not callable(function):
            raise PolicyError(f"policy {policy}: {entry.value} is no function")
        return function  # type: ignore[no-any-return]
    known = ", ".join((*NAMES, *registered()))
    raise PolicyError(f"unknown policy {policy!r}; choose among {known}, or give module:function")


def name_of(policy: str | PolicyFunction) -> str:
    """Return what messages call a policy."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def answer_of(
    name: str, function: PolicyFunction, window: Window, deployed: Placement
) -> tuple[Placement, Int32 | None]:
    """Ask a policy and check its answer; slots that it wastes or leaves empty are filled.

    Parameters
    ----------
    name
        What messages call the policy.
    function
        The policy.
    window, deployed
        What it decides on. It is given copies.

    Returns
    -------
    tuple of Placement and Int32 or None
        Its tables are ``None`` if it has none, or answered a placement that had to be repaired.

    Raises
    ------
    PolicyError
        If the policy fails, or answers no placement.
    """
    try:
        answer = function(widened(window.heat_TLE).copy(), deployed.phy2log_LRS.copy())
    except Exception as error:
        raise PolicyError(f"policy {name} failed ({_in_a_line(error)})") from error
    phy2log, log2phy = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    try:
        given_LRS = checked_foreign(np.asarray(phy2log).reshape(deployed.phy2log_LRS.shape), deployed.experts)
        placement = repaired(given_LRS, deployed.experts, deployed.slots, window.heat_TLE.sum(axis=0))
        if log2phy is None or not np.array_equal(given_LRS, placement.phy2log_LRS):
            return placement, None
        log2phy_RLE = np.ascontiguousarray(log2phy, dtype=np.int32)
        placement.check_log2phy(log2phy_RLE)
    except (ValueError, TypeError, OverflowError) as error:
        raise PolicyError(f"policy {name} answered no placement ({error})") from error
    return placement, log2phy_RLE


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
