"""How figures of a deployment read in a terminal, wherever they are shown."""

from __future__ import annotations

from eplb_service.wire.generated import operator_pb2


def state_text(status: operator_pb2.DeploymentStatus) -> str:
    """Its state in one word or two, with rich's markup."""
    if status.problems:
        return f"[red]{len(status.problems)} problem{'s' if len(status.problems) > 1 else ''}[/]"
    if status.paused:
        return "[yellow]paused[/]"
    return "switching" if status.plan_id else "[green]well[/]"


def par_text(value: float) -> str:
    """A peak-to-average ratio; a dash where none was measured."""
    return f"{value:.3f}" if value else "-"


def size_text(count: float) -> str:
    """Bytes with their unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
