"""eplb-service: keeps expert-parallel ranks evenly loaded while the model serves.

``solve`` and ``Placement`` are the offline entry points. ``solve`` loads the solver on first use, so that commands
that only ask a running service start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eplb_core import __version__
from eplb_core.placement import Placement, PlacementError

if TYPE_CHECKING:
    from eplb_service.offline import Solution, solve

__all__ = ["Placement", "PlacementError", "Solution", "__version__", "solve"]


def __getattr__(name: str) -> Any:
    if name in {"solve", "Solution"}:
        from eplb_service import offline

        return getattr(offline, name)
    raise AttributeError(f"module 'eplb_service' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
