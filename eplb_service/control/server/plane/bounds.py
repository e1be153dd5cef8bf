"""Bounds of a service's deployments, by its settings."""

from __future__ import annotations

from eplb_service.control.core.limits import Limits
from eplb_service.control.core.report_size import FEWEST_STEPS, MOST_STEPS, ReportSize
from eplb_service.control.server.settings import ServiceSettings

_FEWEST_PENDING_STEPS = 64
_REPORTS_PENDING = 8
_LONG_REPORTS_PENDING = 4


def limits_of(settings: ServiceSettings) -> Limits:
    """Those of every deployment."""
    return Limits(
        window_steps=settings.window_steps,
        pending_steps=pending_steps(settings),
        plan_timeout=settings.plan_timeout_seconds,
        first_decision=settings.decision_interval if settings.decide_on == "change" else None,
        interval=settings.decision_interval,
        report_size=report_size(settings),
    )


def pending_steps(settings: ServiceSettings) -> int:
    """Steps that a deployment's fastest rank may be ahead of its slowest before steps are lost."""
    if settings.report_steps == "auto":
        return max(_REPORTS_PENDING * FEWEST_STEPS, _LONG_REPORTS_PENDING * MOST_STEPS)
    return max(_FEWEST_PENDING_STEPS, _REPORTS_PENDING * settings.report_steps)


def report_size(settings: ServiceSettings) -> ReportSize:
    """How many steps the ranks' reports hold at first, and between which bounds."""
    if settings.report_steps != "auto":
        return ReportSize.fixed(settings.report_steps)
    if settings.decide_on == "change":
        # Changes are decided on after a few steps: long reports would make that later.
        return ReportSize()
    return ReportSize.up_to(min(settings.window_steps, settings.decision_interval))
