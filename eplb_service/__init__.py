"""eplb-service: keeps expert-parallel ranks evenly loaded while the model serves.

``solve`` and ``Placement`` are the offline entry points; ``solve`` is loaded on first use, so that the agent,
which shares only ``placement`` and ``wire`` with the service, does not pay for the solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eplb_service.placement import Placement, PlacementError

if TYPE_CHECKING:
    from eplb_service.offline import Solution, solve

__version__ = "0.1.0"
__all__ = ["Placement", "PlacementError", "Solution", "__version__", "solve"]


def __getattr__(name: str) -> Any:
    if name in {"solve", "Solution"}:
        try:
            from eplb_service import offline
        except ImportError as error:
            if error.name == "eplb_service":
                message = (
                    f"{name} is part of eplb-service, and only eplb-agent is installed here; "
                    "install the wheel of eplb-service instead"
                )
                raise ImportError(message) from error
            raise
        return getattr(offline, name)
    raise AttributeError(f"module 'eplb_service' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
