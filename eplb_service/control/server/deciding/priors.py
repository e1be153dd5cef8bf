"""Priors: heat for a deployment's first plan, from a trace or from a different deployment of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from eplb_core.heat.assembler import HeatSnapshot
from eplb_core.heat.window import HeatError
from eplb_core.wire.fields import WireError, check_deployment
from eplb_service.control.core.deployment import Deployment
from eplb_service.io.open_trace import open_trace


class PriorError(ValueError):
    """Raised when a prior cannot be used. The error message names the prior and the reason."""


Prior: TypeAlias = tuple[HeatSnapshot, str]
"""Heat for a deployment's first plan, before it has heat of its own, and the name of the heat's source."""


class Priors:
    """The priors of a service, for example the heat of a prefill deployment for a decode deployment.

    Raises ``PriorError`` if the text is malformed or if a trace cannot be read.

    Parameters
    ----------
    text
        ``DEPLOYMENT=SOURCE,...``. A source is a trace if a file of that name exists, and otherwise a deployment.
    most_steps
        Maximum number of steps to keep from a trace. The newest steps are kept.
    """

    def __init__(self, text: str, most_steps: int) -> None:
        self._sources = _parse_sources(text)
        paths = {source: Path(source) for source in self._sources.values()}
        self._traces = {
            source: _newest_heat(path, most_steps) for source, path in paths.items() if path.exists()
        }

    def of(self, deployment: Deployment, deployments: Mapping[str, Deployment]) -> Prior | None:
        """Return the prior of a deployment; ``None`` if it has no prior or the prior's source has no heat yet.

        Raises ``PriorError`` if the heat comes from a different model.

        Parameters
        ----------
        deployment
            Deployment for which the first plan is made.
        deployments
            All deployments of the service, keyed by name.
        """
        source = self._sources.get(deployment.name)
        if source is None or deployment.group is None:
            return None
        heat = self._traces.get(source)
        if heat is None:
            source_deployment = deployments.get(source)
            if (
                source_deployment is None
                or source_deployment.heat is None
                or not source_deployment.heat.steps
            ):
                return None
            # Source heat refers to the ranks of the source deployment, so it cannot be used here.
            heat = replace(source_deployment.heat.remembered(), sources=())
        shape = deployment.group.shape
        layers, experts = heat.shape
        if heat.shape != (shape.layers, shape.experts):
            raise PriorError(
                f"the prior {source!r} has {layers} layers x {experts} experts, but the deployment has "
                f"{shape.layers} x {shape.experts}; choose a source that serves the same model"
            )
        return heat, source


def _parse_sources(text: str) -> dict[str, str]:
    """Return the source of each deployment's prior; raises ``PriorError`` if the text is malformed.

    Examples
    --------
    >>> _parse_sources("decode=prefill, chat=chat.zarr")
    {'decode': 'prefill', 'chat': 'chat.zarr'}
    """
    sources: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, source = entry.partition("=")
        try:
            check_deployment(name, "the deployment")
        except WireError as error:
            raise PriorError(f"{entry!r} is not a valid prior: {error}") from error
        if not source or name in sources or source == name:
            raise PriorError(
                f"{entry!r} is not a valid prior; use DEPLOYMENT=SOURCE, with one source per deployment, which must "
                "not be the deployment itself"
            )
        sources[name] = source
    return sources


def _newest_heat(path: Path, most_steps: int) -> HeatSnapshot:
    try:
        trace = open_trace(path)
        heat_TLE = trace.heat(max(0, trace.steps - most_steps), trace.steps)
    except HeatError as error:
        raise PriorError(str(error)) from error
    if not np.any(heat_TLE):
        raise PriorError(
            f"{path}: none of the newest {len(heat_TLE)} steps has any tokens; choose another trace"
        )
    return HeatSnapshot(tuple(heat_TLE), heat_TLE.shape[1:])
