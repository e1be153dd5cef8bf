"""Heat that deployments are placed for before they have any of their own, such as prefill's for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eplb_service.control.core.deployment_state import DeploymentState
from eplb_service.heat.window import Counts, HeatError
from eplb_service.io.open_trace import open_trace
from eplb_service.wire.fields import WireError, check_deployment


class PriorError(ValueError):
    """A prior that is of no use; the message says which and why."""


@dataclass(frozen=True)
class Prior:
    """Heat ``[T, L, E]`` and where it comes from."""

    heat_TLE: Counts
    source: str

    def arrays(self) -> tuple[Counts, None]:
        """The heat; nothing is known of the ranks that it comes from."""
        return self.heat_TLE, None


def parse_priors(text: str) -> dict[str, str]:
    """Source of each deployment's prior, from ``DEPLOYMENT=SOURCE,...``; raises ``PriorError``."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, source = part.partition("=")
        if not equals or not source:
            raise PriorError(f"{part!r} is no prior; write DEPLOYMENT=SOURCE")
        try:
            check_deployment(name, "the deployment")
        except WireError as error:
            raise PriorError(f"{part!r}: {error}") from error
        if name in found or source == name:
            raise PriorError(f"{name!r} has one prior, and not itself; got {part!r}")
        found[name] = source
    return found


class Priors:
    """The priors of a service.

    Parameters
    ----------
    text
        ``DEPLOYMENT=SOURCE,...``; a source is a trace where there is such a file, otherwise a deployment.
    most_steps
        Newest steps of a trace that are kept.

    Raises
    ------
    PriorError
        On text that names none, or a trace that cannot be read.
    """

    def __init__(self, text: str, most_steps: int) -> None:
        self._sources = parse_priors(text)
        self._traces = {
            source: _newest(Path(source), most_steps)
            for source in self._sources.values()
            if Path(source).exists()
        }

    def of(self, deployment: DeploymentState, deployments: Mapping[str, DeploymentState]) -> Prior | None:
        """What to place a deployment for now; ``None`` where it has no prior, or that has no heat yet.

        Raises
        ------
        PriorError
            Where the prior is heat of another model.
        """
        source = self._sources.get(deployment.name)
        if source is None or deployment.group is None:
            return None
        heat_TLE = self._traces.get(source)
        if heat_TLE is None:
            other = deployments.get(source)
            if other is None or other.heat is None or not other.heat.steps:
                return None
            heat_TLE, _ = other.heat.remembered().arrays()
        shape = deployment.group.shape
        if heat_TLE.shape[1:] != (shape.layers, shape.experts):
            raise PriorError(
                f"its prior {source!r} has {heat_TLE.shape[1]} layers x {heat_TLE.shape[2]} experts, it has "
                f"{shape.layers} x {shape.experts}: heat of another model"
            )
        return Prior(heat_TLE, source)


def _newest(path: Path, most_steps: int) -> Counts:
    try:
        trace = open_trace(path)
        heat_TLE = trace.heat(max(0, trace.steps - most_steps), trace.steps)
    except HeatError as error:
        raise PriorError(str(error)) from error
    if not np.any(heat_TLE):
        raise PriorError(f"{path}: none of its newest {len(heat_TLE)} steps has a token")
    return heat_TLE
