"""eplb-service: balance the load of expert-parallel ranks while the model serves.

``solve`` and ``Placement`` are the offline entry points. The solver is loaded on the first use of ``solve``, so that
the commands that query a running service start quickly.
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
