"""How figures of a deployment read in a terminal, wherever they are shown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape

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


def worth_text(worth: operator_pb2.Worth) -> str:
    """What balancing is worth, in one line: three times per step, the gain with its interval, and the verdict."""
    colour = {"helps": "green", "costs": "red"}.get(worth.verdict, "yellow")
    parts = [
        f"[{colour}]{escape(worth.verdict)}[/]: {worth.gain_ms:+.3f} ms per step (95 %: {worth.gain_low_ms:+.3f} to "
        f"{worth.gain_high_ms:+.3f})"
    ]
    if worth.HasField("gain_percent"):
        parts.append(f"{worth.gain_percent:+.1f} % of a step of {worth.step_ms:.2f} ms")
    if worth.HasField("tokens_per_second_won"):
        parts.append(f"{worth.tokens_per_second_won:+,.0f} of {worth.tokens_per_second:,.0f} tokens/s")
    parts.append(
        f"experts {worth.left_alone_ms:.3f} ms left alone, {worth.serving_ms:.3f} as served, {worth.best_ms:.3f} best "
        f"known, over {worth.steps} steps"
    )
    return "; ".join(parts)


def price_text(worth: operator_pb2.Worth) -> str:
    """What those milliseconds rest on."""
    return f"{worth.price_kind}: {worth.price}"


def move_price_text(priced: operator_pb2.MovePrice) -> str:
    """What moving weights was taken to cost, and what that rests on."""
    parts = [f"{priced.kind}: a ratio must fall by {priced.price:.2%} for every slot to move"]
    if priced.HasField("ms_per_move"):
        by_size = f" ({priced.ms_per_megabyte:.3g} per MB)" if priced.HasField("ms_per_megabyte") else ""
        parts.append(
            f"{priced.ms_per_move:.3g} ms of steps per expert moved{by_size}, {priced.ms_per_switch:.3g} ms per layer "
            "switched"
        )
    return "; ".join([*parts, priced.reason])


def agent_memory_text(agents: Iterable[operator_pb2.AgentStatus]) -> str:
    """Most that a connected rank's agent holds; empty where none reports it."""
    here = [agent for agent in agents if agent.connected]
    parts = []
    for field, purpose in (("staging_bytes", "for staging"), ("ring_bytes", "for heat")):
        held = [getattr(agent, field) for agent in here if agent.HasField(field)]
        if held:
            parts.append(f"{size_text(max(held))} {purpose}")
    return f"per rank at most {', '.join(parts)}" if parts else ""


def size_text(count: float) -> str:
    """Bytes with their unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
