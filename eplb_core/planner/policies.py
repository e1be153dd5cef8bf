"""Look up policies: built-in names, entry points, ``module:function``, and plain functions.

An external policy is a function ``policy(heat_TLE, phy2log_LRS)``. Its arguments are the tokens in the window,
``[T, L, E]``, and the deployed placement, int32 ``[L, R, S]``. It returns the new placement, or a tuple of the
placement and the tables ``log2phy_RLE``. A package registers its policies as entry points in the group
``eplb.policies``. A policy that keeps state is a class whose constructor needs no arguments. Each replay creates an
instance and calls it. All commands and ``solve`` interpret policy names in the same way.
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
"""Entry point group for policies."""

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
"""Ablations of flashlb, each with the ``SearchOptions`` or ``PlannerSettings`` that disable one component."""

NAMES = (*POLICIES, *ABLATIONS)
"""Names of the built-in policies."""

PolicyFunction = Callable[..., Any]


class PolicyError(ValueError):
    """A policy does not exist, fails, or returns an invalid placement. The message names the policy and the reason."""


def options_of(policy: str) -> dict[str, Any]:
    """Return the options of a built-in policy, for ``request.with_options``.

    Examples
    --------
    >>> options_of("flashlb-no-tree")
    {'policy': 'flashlb', 'tree_search': False}
    >>> options_of("deepseek")
    {'policy': 'deepseek'}
    """
    return {"policy": "flashlb", **ABLATIONS[policy]} if policy in ABLATIONS else {"policy": policy}


def registered() -> tuple[str, ...]:
    """Return the sorted names of the policies that installed packages register."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def external_policy(policy: str | PolicyFunction) -> PolicyFunction | None:
    """Return the function of an external policy.

    Parameters
    ----------
    policy
        A function, the name of a built-in policy or of an entry point, or ``module:function``.

    Returns
    -------
    PolicyFunction or None
        ``None`` for a built-in policy.

    Raises
    ------
    PolicyError
        If the policy does not exist or cannot be imported.
    """
    if callable(policy):
        return policy
    if policy in NAMES:
        return None
    if not isinstance(policy, str):
        raise PolicyError(f"policy is {policy!r}; it must be a name or a function")
    module_name, colon, attribute = policy.partition(":")
    if not colon:
        return _registered_function(policy)
    # Unlike python -m, an installed command does not search the working directory for modules.
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(working_directory)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PolicyError(f"policy {policy}: cannot import {module_name!r} ({_one_line(error)})") from error
    return _function_of(
        policy, getattr(module, attribute, None), f"{module_name} has no function {attribute!r}"
    )


def _registered_function(policy: str) -> PolicyFunction:
    """Load the entry point with this name. Raises ``PolicyError`` if it does not exist or is not a function."""
    for entry in entry_points(group=GROUP, name=policy):
        try:
            function = entry.load()
        except Exception as error:
            raise PolicyError(
                f"policy {policy}: cannot import {entry.value!r} ({_one_line(error)})"
            ) from error
        return _function_of(policy, function, f"{entry.value} is not a function")
    names = ", ".join((*NAMES, *registered()))
    raise PolicyError(f"unknown policy {policy!r}; choose one of {names}, or specify module:function")


def _function_of(policy: str, loaded: Any, problem: str) -> PolicyFunction:
    """Return a loaded function, or an instance of a loaded class. Raises ``PolicyError`` if neither can be called."""
    try:
        function = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:
        raise PolicyError(f"policy {policy} cannot start ({_one_line(error)})") from error
    if not callable(function):
        raise PolicyError(f"policy {policy}: {problem}")
    return function  # type: ignore[no-any-return]


def name_of(policy: str | PolicyFunction) -> str:
    """Return the name of a policy for use in messages."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def run_external_policy(
    name: str, function: PolicyFunction, window: Window, deployed: Placement
) -> tuple[Placement, Int32 | None]:
    """Call an external policy and check its result.

    If the policy leaves slots empty, or places an expert twice on the same rank, the affected slots are refilled.

    Parameters
    ----------
    name
        Name of the policy for use in messages.
    function
        The policy. It receives copies of the heat and the placement.
    window
        Heat on which the policy bases its decision.
    deployed
        Deployed placement.

    Returns
    -------
    tuple of Placement and Int32 or None
        New placement and its tables, int32 ``[R, L, E]`` or ``[R, L, E, D]``. The tables are ``None`` if the policy
        returned none, or if its placement was repaired.

    Raises
    ------
    PolicyError
        If the policy fails or returns an invalid placement or invalid tables.

    Examples
    --------
    A policy that swaps the two ranks:

    >>> def swap_ranks(heat_TLE, phy2log_LRS):
    ...     return phy2log_LRS[:, ::-1]
    >>> deployed = Placement.linear(layers=1, experts=4, ranks=2, slots=2)
    >>> window = Window(np.ones((1, 1, 4), dtype=np.int64))
    >>> placement, log2phy_RLE = run_external_policy("swap", swap_ranks, window, deployed)
    >>> placement.phy2log_LRS.tolist()
    [[[2, 3], [0, 1]]]
    >>> log2phy_RLE is None
    True
    """
    try:
        result = function(widened(window.heat_TLE).copy(), deployed.phy2log_LRS.copy())
    except Exception as error:
        raise PolicyError(f"policy {name} failed ({_one_line(error)})") from error
    has_tables = isinstance(result, tuple) and len(result) == 2
    phy2log, log2phy = result if has_tables else (result, None)
    try:
        foreign_LRS = checked_foreign(
            np.asarray(phy2log).reshape(deployed.phy2log_LRS.shape), deployed.experts
        )
        placement = repaired(foreign_LRS, deployed.experts, deployed.slots, window.heat_TLE.sum(axis=0))
        if log2phy is None or not np.array_equal(foreign_LRS, placement.phy2log_LRS):
            return placement, None
        log2phy_RLE = np.ascontiguousarray(log2phy, dtype=np.int32)
        placement.check_log2phy(log2phy_RLE)
    except (ValueError, TypeError, OverflowError) as error:
        raise PolicyError(f"policy {name} returned an invalid placement ({error})") from error
    return placement, log2phy_RLE


def _one_line(error: Exception) -> str:
    """Return the type and message of an error, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
