"""Memory for heat: what deployments of a shape cost, and who has to give some back for another."""

from __future__ import annotations

from collections.abc import Collection

from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import ExhaustedError
from eplb_service.control.core.limits import Limits
from eplb_service.heat.assembler import memory_bytes
from eplb_service.wire.hello import Hello


class HeatBudget:
    """Divides the memory for heat among deployments.

    Parameters
    ----------
    limits
        Of each deployment.
    most_bytes
        Of all together.
    """

    def __init__(self, limits: Limits, most_bytes: int) -> None:
        self._limits = limits
        self._most_bytes = most_bytes

    def price(self, deployment: Deployment) -> int:
        """Bytes that a deployment takes at most."""
        if deployment.group is None:
            return 0
        limits = self._limits
        return memory_bytes(deployment.group.shape, limits.window_steps, limits.pending_steps)

    def to_rest(self, hello: Hello, deployments: Collection[Deployment]) -> list[Deployment]:
        """Those to which nobody is connected and whose memory is needed for what ``hello`` asks for.

        Raises
        ------
        ExhaustedError
            Where even all of them are too few.
        """
        needed = memory_bytes(hello.shape, self._limits.window_steps, self._limits.pending_steps)
        others = [one for one in deployments if one.name != hello.deployment]
        taken, resting = sum(map(self.price, others)), []
        for idle in [one for one in others if one.group is not None and not one.connected]:
            if taken + needed <= self._most_bytes:
                break
            taken -= self.price(idle)
            resting.append(idle)
        if taken + needed > self._most_bytes:
            raise ExhaustedError(
                f"heat of this shape needs {needed >> 20} MiB, and {taken >> 20} MiB of the "
                f"{self._most_bytes >> 20} MiB that max_heat_bytes allows are taken"
            )
        return resting
